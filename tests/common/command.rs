//! The `vvae` command as a user runs it, and clips for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::small;

/// Cargo builds it with the tests, next to them.
pub fn executable() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let path = test.ancestors().nth(2).expect("tests are in deps").join("examples").join("vvae");
    let path = path.with_extension(std::env::consts::EXE_EXTENSION);
    assert!(path.exists(), "{} is not built; run: cargo build --example vvae", path.display());
    path
}

pub fn vvae(words: &[&str]) -> Command {
    let mut command = Command::new(executable());
    command.args(words).env("VIDEO_VAE_WEIGHTS", small()).env_remove("VIDEO_VAE_LIBRARY").env_remove("FFMPEG");
    command
}

pub fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

/// Runs it, and asserts success. Returns its output.
#[track_caller]
pub fn succeeds(words: &[&str]) -> String {
    let output = vvae(words).output().expect("it starts");
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    out(&output)
}

/// Runs it, and asserts a failure with one line that has these words.
#[track_caller]
pub fn fails(words: &[&str], said: &[&str]) {
    let output = vvae(words).output().expect("it starts");
    assert!(!output.status.success(), "{words:?} succeeded: {}", out(&output));
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(error.starts_with("vvae: ") && error.lines().count() == 1, "{words:?} must print one line: {error}");
    for word in said {
        assert!(error.contains(word), "{words:?}: \"{word}\" is not in: {error}");
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A y4m file, 420 with 8 bits, of moving waves.
pub fn y4m(width: usize, height: usize, frames: usize) -> Vec<u8> {
    let mut bytes = format!("YUV4MPEG2 W{width} H{height} F30000:1001 Ip A1:1 C420jpeg\n").into_bytes();
    for frame in 0..frames {
        bytes.extend(b"FRAME\n");
        let wave = |x: usize, y: usize| ((x + 2 * y + 3 * frame) as f32 / 9.0).sin();
        bytes.extend((0..width * height).map(|i| (126.0 + 90.0 * wave(i % width, i / width)) as u8));
        let chroma = width.div_ceil(2) * height.div_ceil(2);
        bytes.extend((0..2 * chroma).map(|i| (128.0 + 40.0 * wave(i % 31, i / 31)) as u8));
    }
    bytes
}

pub fn header(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    String::from_utf8_lossy(bytes.split(|b| *b == b'\n').next().unwrap_or_default()).into_owned()
}

/// Names of all files in a folder, including hidden ones.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Whether a program is installed. Without it the test is skipped; in CI it fails.
pub fn tool(name: &str) -> bool {
    let there = Command::new(name).arg("-version").output().is_ok_and(|output| output.status.success());
    assert!(there || std::env::var_os("CI").is_none(), "{name} is not installed");
    if !there {
        println!("skipped: {name} is not installed");
    }
    there
}
