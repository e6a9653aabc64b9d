//! Every command in every README is run by a test, or listed here with the reason why not.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::root;

enum How {
    /// File and function of the test that runs it.
    Test(&'static str, &'static str),
    /// Why no test does.
    Not(&'static str),
}
use How::{Not, Test};

const CARGO: How = Not("cargo has just done this to run the tests");
const INSTALLS: How = Not("installs system packages, or downloads");
const WINDOWS: How = Not("needs Windows, or Wine and half an hour");

/// README, how a command in it begins, and what becomes of it.
const COMMANDS: &[(&str, &str, How)] = &[
    ("README.md", "cargo run --release --example vvae -- demo", Test("command/vvae", "demo_reaches_its_quality")),
    ("README.md", "cargo run --release --example vvae -- --help", Test("command/vvae", "help_is_complete")),
    (
        "README.md",
        "cargo run --release --example vvae -- get",
        Test("command/get", "a_checkpoint_is_downloaded_and_found_by_its_name"),
    ),
    (
        "README.md",
        "cargo run --release --example vvae -- roundtrip",
        Test("command/formats", "containers_come_through_pipes_and_in_parts"),
    ),
    ("README.md", "cargo build --release", CARGO),
    ("README.md", "cargo test --release --workspace", CARGO),
    ("README.md", "cc -Iinclude demo.c", Test("repository/readme", "readme_c_program_compiles_and_runs")),
    ("README.md", "cmake -S host-examples/cpp", Test("host/cpp", "readme_programs_run")),
    ("README.md", "host-examples/csharp/run.sh roundtrip", Test("host/csharp", "tests_and_sample_under_mono")),
    ("README.md", "pip install ./host-examples/python", Test("host/python", "package_passes_its_other_tests")),
    ("README.md", "host-examples/windows/build.sh", WINDOWS),
    ("host-examples/cpp/README.md", "cmake -S host-examples/cpp", Test("host/cpp", "readme_programs_run")),
    (
        "host-examples/cpp/README.md",
        "target/cpp/graph_host nodes",
        Test("host/cpp", "graph_host_lists_nodes_and_devices"),
    ),
    ("host-examples/cpp/README.md", "target/cpp/graph_host host-examples", Test("host/cpp", "readme_programs_run")),
    ("host-examples/cpp/README.md", "target/cpp/roundtrip", Test("host/cpp", "readme_programs_run")),
    (
        "host-examples/csharp/README.md",
        "host-examples/csharp/run.sh info",
        Test("host/csharp", "tests_and_sample_under_mono"),
    ),
    (
        "host-examples/csharp/README.md",
        "host-examples/csharp/run.sh roundtrip",
        Test("host/csharp", "tests_and_sample_under_mono"),
    ),
    (
        "host-examples/csharp/README.md",
        "host-examples/csharp/run.sh tests",
        Test("host/csharp", "tests_and_sample_under_mono"),
    ),
    (
        "host-examples/python/README.md",
        "pip install video_vae-*.whl",
        Test("host/python", "package_passes_its_other_tests"),
    ),
    (
        "host-examples/python/README.md",
        "pip install ./host-examples/python",
        Not("test_wheel.py builds and installs it from a copy"),
    ),
    ("host-examples/comfyui/README.md", "curl -X POST", Not("needs a running ComfyUI; tests/integration.sh has one")),
    ("host-examples/windows/README.md", "host-examples/windows/", WINDOWS),
    (
        "host-examples/rust/README.md",
        "cargo run --release --example vvae -- demo",
        Test("command/vvae", "demo_reaches_its_quality"),
    ),
    (
        "host-examples/rust/README.md",
        "vvae info",
        Test("command/vvae", "info_lists_devices_parameters_and_checkpoints"),
    ),
    (
        "host-examples/rust/README.md",
        "vvae get",
        Test("command/get", "a_checkpoint_is_downloaded_and_found_by_its_name"),
    ),
    ("host-examples/rust/README.md", "vvae roundtrip", Test("command/files", "hdr_video_with_sound_keeps_what_it_is")),
    ("host-examples/rust/README.md", "vvae encode", Test("command/files", "latents_know_their_checkpoint_and_video")),
    ("host-examples/rust/README.md", "vvae decode", Test("command/files", "latents_know_their_checkpoint_and_video")),
    ("host-examples/rust/README.md", "ffmpeg -i", Test("command/pipes", "y4m_through_pipes_has_the_bytes_of_files")),
    ("host-examples/rust/README.md", "vvae plan", Test("command/files", "plan_tells_what_the_command_does")),
    (
        "host-examples/rust/README.md",
        "vvae compare hdr.mp4 back.mp4",
        Test("command/files", "compare_finds_the_worst_frame"),
    ),
    (
        "host-examples/rust/README.md",
        "vvae compare hdr.mp4 --precisions",
        Test("command/compare", "the_figures_are_those_of_the_decoded_files"),
    ),
    ("host-examples/rust/README.md", "vvae check", Test("command/files", "check_prints_one_line")),
    ("host-examples/rust/README.md", "vvae bench", Test("command/vvae", "bench_prints_a_table_and_json")),
    ("packaging/README.md", "packaging/", INSTALLS),
    ("packaging/README.md", "cargo build --release --lib --example vvae", CARGO),
    ("packaging/README.md", "cmake ", WINDOWS),
];

fn readmes(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let hidden = name.to_string_lossy().starts_with('.') || name == "target" || name == "node_modules";
        if path.is_dir() && !hidden {
            readmes(&path, found);
        } else if name == "README.md" {
            found.push(path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/"));
        }
    }
}

/// Lines that are indented by four spaces outside fences, and what stands in backticks in the last column of a table.
fn commands(text: &str) -> Vec<String> {
    let (mut found, mut fenced, mut continued) = (Vec::new(), false, false);
    for line in text.lines() {
        fenced ^= line.starts_with("```");
        let indented = line.strip_prefix("    ").filter(|rest| !fenced && !rest.starts_with([' ', '#']));
        if let Some(command) = indented.filter(|_| !continued) {
            found.push(command.split("   #").next().unwrap().trim().to_owned());
        }
        continued = line.ends_with('\\');
        let programs = ["cargo ", "cmake ", "pip ", "host-examples/"];
        let cell = line.strip_prefix('|').and_then(|row| row.trim_end().trim_end_matches('|').rsplit('|').next());
        let cell = cell.and_then(|cell| cell.trim().strip_prefix('`')).and_then(|cell| cell.split('`').next());
        let path_alone = |cell: &str| cell.starts_with("host-examples/") && !cell.contains(' ');
        found.extend(
            cell.filter(|cell| programs.iter().any(|p| cell.starts_with(p)) && !path_alone(cell)).map(str::to_owned),
        );
    }
    found
}

#[test]
fn every_readme_command_is_accounted_for() {
    let mut files = Vec::new();
    readmes(root(), &mut files);
    assert!(files.len() >= 8, "{files:?}");
    let mut used = BTreeSet::new();
    for file in &files {
        for command in commands(&std::fs::read_to_string(root().join(file)).unwrap()) {
            let known = COMMANDS.iter().position(|(of, start, _)| of == file && command.starts_with(start));
            let known = known.unwrap_or_else(|| panic!("{file}: \"{command}\" is run by no test; list it here"));
            used.insert(known);
        }
    }
    for (index, (file, start, how)) in COMMANDS.iter().enumerate() {
        assert!(used.contains(&index), "{file} no longer has \"{start}\"");
        match how {
            Test(program, function) => {
                let source = std::fs::read_to_string(root().join(format!("tests/{program}.rs"))).unwrap();
                assert!(source.contains(&format!("fn {function}(")), "tests/{program}.rs has no {function}");
            }
            Not(reason) => println!("not run: {file}: {start}: {reason}"),
        }
    }
}

/// The README's section "Two commands" is the demo and the tests, and `.ci/run` runs the tests by the same command.
#[test]
fn ci_runs_the_readme_s_test_command() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let section = readme.split("## Two commands\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let [demo, tests]: [String; 2] = commands(section).try_into().expect("two commands");
    assert_eq!(demo, "cargo run --release --example vvae -- demo");
    let script = std::fs::read_to_string(root().join(".ci/run")).unwrap();
    let last = script.lines().rev().find(|line| !line.trim().is_empty() && !line.starts_with('#')).unwrap();
    assert_eq!(last.trim(), tests, "the last command of .ci/run");
}
