//! The C# host of host-examples/csharp: its declarations match the header, and its tests pass on mono and .NET Core.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

use crate::common::tools::{has, said, skip, succeeds};
use crate::common::{demo, library_path, root};
use video_vae::capi::*;

/// One test at a time: they measure time and memory.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn csharp() -> PathBuf {
    root().join("host-examples/csharp")
}

fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("host_csharp").join(name)
}

/// The .NET Core runtime: DOTNET_ROOT, or the folder in PyPI's `dotnetcore2`.
fn core_runtime() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("DOTNET_ROOT") {
        return Some(PathBuf::from(folder));
    }
    let ask = "import dotnetcore2, os; print(os.path.join(os.path.dirname(dotnetcore2.__file__), 'bin'))";
    let installed = root().join("target/ci-tools/bin/python");
    let python = if installed.exists() { installed } else { "python3".into() };
    let output = Command::new(python).args(["-c", ask]).output().ok().filter(|output| output.status.success())?;
    Some(PathBuf::from(String::from_utf8(output.stdout).ok()?.trim()))
}

/// The newest version of the runtime in that folder.
fn framework(runtime: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(runtime.join("shared/Microsoft.NETCore.App")).ok()?;
    versions.map(|entry| entry.unwrap().path()).max()
}

/// The layout of every struct, in the format of the C# program, sorted.
fn layouts() -> Vec<String> {
    let mut out = Vec::new();
    macro_rules! layout {
        ($($name:ident { $($field:ident),* $(,)? })*) => {$(
            out.push(format!("layout {} {}", stringify!($name), size_of::<$name>()));
            // Must name every field, or it does not compile.
            let $name { $($field: _),* } = crate::common::sized::<$name>();
            $(
                let offset = std::mem::offset_of!($name, $field);
                out.push(format!("layout {}.{} {offset}", stringify!($name), stringify!($field)));
            )*
        )*};
    }
    crate::common::with_structs! { layout }
    out.sort_unstable();
    out
}

/// Runs tests and sample of one build. `program` gives the command that starts a program on a runtime.
fn run(program: impl Fn(&str) -> Command) {
    let started = |name: &str| {
        let mut command = program(name);
        command.env("LD_LIBRARY_PATH", library_path().parent().unwrap());
        command
    };
    let text = succeeds(started("tests").arg(root().join("tests/golden")));
    let mut found: Vec<&str> = text.lines().filter(|line| line.starts_with("layout ")).collect();
    found.sort_unstable();
    assert_eq!(found, layouts());
    text.lines().filter(|line| !line.starts_with("layout ")).for_each(|line| println!("{line}"));
    assert_eq!(text.lines().filter(|line| line.starts_with("ok ")).count(), 12, "{text}");

    let text = succeeds(started("sample").arg("info"));
    assert!(text.contains("device cpu:") && text.contains("memory_limit = auto (Bytes)"), "{text}");
    let text = succeeds(started("sample").arg("roundtrip").arg(demo()));
    assert!(text.contains("untiled: exact") && text.contains("dB between"), "{text}");
    assert!(text.contains("seedvr2: 3 pixel channels") && text.contains("(z - 0) * 0.9152 (seedvr2)"), "{text}");
    let quality = text.split(" dB between").next().unwrap().rsplit('\n').next().unwrap().parse::<f64>().unwrap();
    assert!(quality > 25.0, "{text}");
    let output = started("sample").args(["roundtrip", "/no/such/file"]).output().unwrap();
    assert!(output.status.code() == Some(1) && said(&output).contains("(status Checkpoint)"), "{}", said(&output));
}

#[test]
fn declarations_match_the_header() {
    if has("python3") {
        succeeds(Command::new("python3").arg(csharp().join("generate.py")).arg("--check"));
    }
}

#[test]
fn tests_and_sample_under_mono() {
    let _alone = alone();
    if !has("mcs") || !has("mono") {
        return;
    }
    let folder = scratch("mono");
    succeeds(Command::new(csharp().join("build.sh")).arg(&folder));
    run(|name| {
        let mut command = Command::new("mono");
        command.arg(folder.join(name).with_extension("exe"));
        command
    });
}

#[test]
fn tests_and_sample_under_dotnet_core() {
    let _alone = alone();
    if !has("mcs") {
        return;
    }
    let Some((runtime, framework)) = core_runtime().and_then(|runtime| Some((runtime.clone(), framework(&runtime)?)))
    else {
        return skip("no .NET Core runtime: pip install dotnetcore2, or set DOTNET_ROOT");
    };
    let folder = scratch("core");
    succeeds(Command::new(csharp().join("build.sh")).arg(&folder).arg(&framework));
    run(|name| {
        let mut command = Command::new(runtime.join("dotnet"));
        command.arg(folder.join(name).with_extension("dll"));
        command
    });
}
