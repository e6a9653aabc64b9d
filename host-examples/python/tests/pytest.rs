//! Runs the Python tests of a folder; for tests/host/python.rs.

use std::path::Path;
use std::process::Command;

/// Python with what the tests need. Without it the test says that it did not run; in CI it fails.
fn python() -> Option<String> {
    let name = std::env::var("PYTHON").unwrap_or_else(|_| installed().unwrap_or_else(|| "python3".into()));
    let why = match Command::new(&name).args(["-c", "import numpy, pytest"]).output() {
        Ok(output) if output.status.success() => return Some(name),
        Ok(output) => String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned(),
        Err(why) => why.to_string(),
    };
    assert!(std::env::var_os("CI").is_none(), "{name}: {why}");
    println!("skipped: {name}: {why}");
    None
}

/// What `.ci/run --tools` installs.
fn installed() -> Option<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/ci-tools/bin/python");
    path.exists().then(|| path.to_string_lossy().into_owned())
}

/// The tests of a folder whose names fit an expression of `pytest -k`, with this library. An empty one fits all.
pub fn passes(folder: &Path, names: &str, library: &Path) {
    let Some(python) = python() else { return };
    let mut command = Command::new(python);
    command.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-k", names, "tests"]).current_dir(folder);
    command.env("VIDEO_VAE_LIBRARY", library).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{command:?}\n{}{}", text[0], text[1]);
    println!("{}", text[0]);
}
