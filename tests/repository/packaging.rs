//! packaging/build.sh on a machine that lacks tools: it says so before it compiles anything.
#![cfg(unix)]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What the script itself runs before it looks for tools.
const SHELL: [&str; 7] = ["bash", "dirname", "sed", "head", "env", "python3", "uname"];

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A folder of programs: those of the shell, and stand-ins that note that they were called.
fn programs(folder: &Path, stand_ins: &[&str]) {
    for name in SHELL {
        if let Some(found) = std::env::split_paths(&std::env::var_os("PATH").unwrap())
            .map(|path| path.join(name))
            .find(|path| path.is_file())
        {
            symlink(found, folder.join(name)).unwrap();
        }
    }
    for name in stand_ins {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\necho {name} >> {}/called\n", folder.display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
}

fn build(folder: &Path, options: &[&str]) -> (Output, String) {
    let mut command = Command::new("bash");
    command.arg(crate::common::root().join("packaging/build.sh")).args(options).env("PATH", folder);
    command.env("CARGO_TARGET_DIR", folder.join("target"));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, said)
}

#[test]
fn missing_tools_are_named_before_anything_is_compiled() {
    let folder = folder("packaging-tools");
    programs(&folder, &["cargo", "rustc", "strip", "make", "c++", "tar", "gzip", "sha256sum"]);
    let (output, said) = build(&folder, &[]);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for word in ["cmake", "mcs", "mono", "x86_64-w64-mingw32-gcc-posix", "--install", "--no-windows", "mono-mcs"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    let (output, said) = build(&folder, &["--no-windows"]);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cmake") && said.contains("--install") && !said.contains("mingw"), "{said}");
    assert!(!folder.join("called").exists(), "a tool ran before all were there");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn an_unknown_option_is_named() {
    let folder = folder("packaging-option");
    programs(&folder, &[]);
    let (output, said) = build(&folder, &["--linux"]);
    assert!(output.status.code() == Some(1) && said.contains("unknown option --linux"), "{said}");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// What the workflows run is there: a step that names a script which was moved would fail where nobody looks.
#[test]
fn workflows_run_scripts_that_exist() {
    let folder = crate::common::root().join(".github/workflows");
    let texts: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    let steps: Vec<&str> =
        texts.iter().flat_map(|text| text.lines()).filter_map(|line| line.trim().strip_prefix("- run: ")).collect();
    for script in [".ci/run", "packaging/build.sh", "packaging/try.sh"] {
        assert!(
            steps.iter().any(|step| step.split(' ').next() == Some(script)),
            "no workflow runs {script}: {steps:?}"
        );
    }
    let scripts = steps.iter().filter_map(|step| step.split(' ').next()).filter(|word| word.contains('/'));
    for script in scripts {
        let mode = std::fs::metadata(crate::common::root().join(script)).unwrap().permissions().mode();
        assert!(mode & 0o111 != 0, "{script} is no program");
    }
}
