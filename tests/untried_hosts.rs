//! Says at the end of `cargo test` which hosts were not tried for want of a tool, and how to get the tools. It runs
//! near the end, because cargo runs the programs of tests/ in the order of their names. It writes past the harness, which
//! hides what a passing test prints.

use std::io::Write;
use std::path::Path;
use std::process::Command;

/// What is needed, how it is asked, and what is not tried without it.
const TOOLS: [(&str, &[&str], &str); 10] = [
    ("cc", &["--version"], "C"),
    ("c++", &["--version"], "C++"),
    ("cmake", &["--version"], "C++"),
    ("pkg-config", &["--version"], "C++ by pkg-config"),
    ("nm", &["--version"], "the library's symbols"),
    ("mcs", &["--version"], "C#"),
    ("mono", &["--version"], "C#"),
    ("ffmpeg", &["-version"], "the command's video files"),
    ("ffprobe", &["-version"], "the command's video files"),
    ("chromedriver", &["--version"], "the report in a browser"),
];

fn answers(program: &str, words: &[&str]) -> bool {
    Command::new(program).args(words).output().is_ok_and(|output| output.status.success())
}

#[test]
fn untried_hosts_are_named() {
    let mut missing: Vec<String> = TOOLS
        .iter()
        .filter(|(tool, words, _)| !answers(tool, words))
        .map(|(tool, _, host)| format!("{host} ({tool} is missing)"))
        .collect();
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/ci-tools/bin/python");
    let usual = if installed.exists() { installed.to_string_lossy().into_owned() } else { "python3".into() };
    let python = std::env::var("PYTHON").unwrap_or(usual);
    if !answers(&python, &["-c", "import numpy, pytest"]) {
        missing.push(format!("Python and ComfyUI ({python} has no numpy and pytest)"));
    }
    if std::env::var_os("DOTNET_ROOT").is_none() && !answers(&python, &["-c", "import dotnetcore2"]) {
        missing.push("C# on .NET Core (no runtime)".into());
    }
    let words = if missing.is_empty() {
        "\nEvery host was tried.\n".into()
    } else {
        let how = "To install what is missing (Debian and Ubuntu, as root), and then test again: .ci/run --tools";
        format!("\nNot tried on this machine:\n  {}\n{how}\n", missing.join("\n  "))
    };
    writeln!(std::io::stdout(), "{words}").unwrap();
    assert!(missing.is_empty() || std::env::var_os("CI").is_none(), "CI tries every host");
}
