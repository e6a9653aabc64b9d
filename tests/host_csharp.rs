//! The C# host of host-examples/csharp: its declarations match the header, and its tests pass on mono and .NET Core.

mod common;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard};

use common::{demo, library_path, root};
use video_vae::capi::*;

/// One test at a time: they measure time and memory.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Reports a skipped test; in CI it fails.
fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    println!("skipped: {why}");
}

fn has(tool: &str) -> bool {
    let there = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        skip(&format!("{tool} is not installed"));
    }
    there
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[track_caller]
fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|why| panic!("{command:?}: {why}"));
    assert!(output.status.success(), "{command:?}\n{}", said(&output));
    said(&output)
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

/// The layout of every struct, in the format of the C# program.
fn layouts() -> String {
    let mut out = String::new();
    macro_rules! layout {
        ($($name:ident { $($field:ident),* $(,)? })*) => {$(
            writeln!(out, "layout {} {}", stringify!($name), size_of::<$name>()).unwrap();
            // Must name every field, or it does not compile.
            let $name { $($field: _),* } = common::sized::<$name>();
            $(
                let offset = std::mem::offset_of!($name, $field);
                writeln!(out, "layout {}.{} {offset}", stringify!($name), stringify!($field)).unwrap();
            )*
        )*};
    }
    layout! {
        vvae_create_info {
            struct_size, abi_version, weights, device, log, log_user, alloc, free, alloc_user, device_alloc,
            device_free, device_alloc_user,
        }
        vvae_model_desc { struct_size, pixel_channels, latent_channels, spatial_scale, time_scale }
        vvae_memory_info { struct_size, streams, now, peak, reserved, host }
        vvae_handle_device_info {
            struct_size, device_count, device_type, device_id, id, unused, now, peak, reserved, host, device_bytes,
            host_bytes, first_clip, first_frame, frames, seconds, measured_seconds,
        }
        vvae_tensor { data, device_type, device_id, ndim, dtype, shape, strides, byte_offset }
        vvae_run_info { struct_size, flags, cuda_stream, progress, progress_user, logvar }
        vvae_plan_info {
            struct_size, exact, device_bytes, host_bytes, weight_bytes, workspace_bytes, input_shape, output_shape,
            slice_frames, chunk_frames, chunk_count, tile_rows, tile_columns, tile_height, tile_width, tile_overlap,
            text_length, past_bytes, moved_bytes_per_frame, seconds, waiting_weight_bytes,
        }
        vvae_run_report {
            struct_size, exact, node, seconds, estimated_seconds, device_bytes, host_bytes, slice_frames, tile_rows,
            tile_columns, text_length,
        }
        vvae_device_desc {
            struct_size, device_type, device_id, id, name, memory_total, memory_free, uuid, compute_major, compute_minor,
        }
        vvae_node_desc { struct_size, reserved, id, label, help }
        vvae_port_desc { struct_size, direction, optional, dtype_count, dtypes, name, kind, help }
        vvae_param_desc {
            struct_size, kind, flags, choice_count, key, default_value, unit, help, min, max, step,
        }
    }
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
    let found: String =
        text.lines().filter(|line| line.starts_with("layout ")).map(|line| format!("{line}\n")).collect();
    assert_eq!(found, layouts());
    text.lines().filter(|line| !line.starts_with("layout ")).for_each(|line| println!("{line}"));
    assert_eq!(text.lines().filter(|line| line.starts_with("ok ")).count(), 12, "{text}");

    let text = succeeds(started("sample").arg("info"));
    assert!(text.contains("device cpu:") && text.contains("memory_limit = auto (Bytes)"), "{text}");
    let text = succeeds(started("sample").arg("roundtrip").arg(demo()));
    assert!(text.contains("untiled: exact") && text.contains("dB between"), "{text}");
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
