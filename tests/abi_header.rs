//! The header in C and C++: it compiles alone, its structs match the library's, and programs run with it.

mod common;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::tools::{has, succeeds};
use video_vae::capi::*;

const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-pedantic", "-Werror"];

/// A compiler, if there is one. Without one the test is skipped; in CI it fails.
fn compiler(variable: &str, default: &str) -> Option<String> {
    let name = std::env::var(variable).unwrap_or_else(|_| default.into());
    has(&name).then_some(name)
}

/// A folder for one test.
fn scratch(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A header beside the source comes before that of today.
fn compile(compiler: &str, standard: &str, source: &str) -> Command {
    let mut command = Command::new(compiler);
    command.arg(format!("-std={standard}")).args(STRICT).arg("-I").arg(common::root().join("include"));
    command.arg(common::root().join("tests/c").join(source));
    command
}

#[test]
fn header_compiles_alone_in_every_standard() {
    let folder = scratch("alone");
    if let Some(cc) = compiler("CC", "cc") {
        for standard in ["c99", "c11", "c17"] {
            succeeds(compile(&cc, standard, "header.c").arg("-c").arg("-o").arg(folder.join("c.o")));
        }
    }
    if let Some(cxx) = compiler("CXX", "c++") {
        for standard in ["c++17", "c++20"] {
            succeeds(compile(&cxx, standard, "header.cpp").arg("-c").arg("-o").arg(folder.join("cpp.o")));
            let mut as_cpp = Command::new(&cxx);
            as_cpp.arg(format!("-std={standard}")).args(STRICT).arg("-I").arg(common::root().join("include"));
            as_cpp.args(["-x", "c++", "-c"]).arg(common::root().join("tests/c/header.c"));
            succeeds(as_cpp.arg("-o").arg(folder.join("c_as_cpp.o")));
        }
    }
}

/// The sources of the header, in its order.
const SOURCES: [&str; 6] = ["types", "handle", "run", "range", "stream", "discovery"];

#[test]
fn header_is_what_the_source_says() {
    let root = common::root();
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let sources = SOURCES.iter().map(|source| root.join(format!("src/capi/{source}.rs")));
    let bindings = sources.fold(cbindgen::Builder::new().with_config(config), |builder, path| builder.with_src(path));
    let mut fresh = Vec::new();
    bindings.generate().unwrap().write(&mut fresh);
    let header = root.join("include/video_vae.h");
    if std::env::var_os("VVAE_UPDATE_HEADER").is_some_and(|value| value == "1") {
        std::fs::write(&header, &fresh).unwrap();
    }
    let committed = std::fs::read_to_string(&header).unwrap_or_default().replace("\r\n", "\n");
    assert!(fresh == committed.as_bytes(), "stale; run: VVAE_UPDATE_HEADER=1 cargo test --release --test abi_header");
}

/// One line of C per field. The pattern must name every field, or it does not compile.
macro_rules! layout {
    ($out:ident, $($name:ident { $($field:ident),* $(,)? })*) => {$(
        writeln!($out, "SIZE({}, {})", stringify!($name), size_of::<$name>()).unwrap();
        let value: $name = common::sized();
        let $name { $($field),* } = value;
        $(
            let offset = std::mem::offset_of!($name, $field);
            let names = (stringify!($name), stringify!($field));
            writeln!($out, "FIELD({}, {}, {offset}, {})", names.0, names.1, size_of_val(&$field)).unwrap();
        )*
    )*};
}

macro_rules! constants {
    ($out:ident, $($name:ident)*) => {
        $(writeln!($out, "CONSTANT({}, {})", stringify!($name), $name as i64).unwrap();)*
    };
}

/// Sizes, fields and constants as Rust sees them: a line each.
fn layout_lines() -> String {
    let mut out = String::new();
    common::with_structs! { layout out, }
    constants! { out,
        VVAE_ABI_MAJOR VVAE_ABI_MINOR VVAE_ABI_VERSION VVAE_OK VVAE_AGAIN VVAE_END
        VVAE_ERROR_ARGUMENT VVAE_ERROR_TENSOR VVAE_ERROR_CHECKPOINT VVAE_ERROR_DEVICE VVAE_ERROR_MEMORY
        VVAE_ERROR_CANCELLED VVAE_ERROR_STATE VVAE_ERROR_INTERNAL
        VVAE_DEVICE_CPU VVAE_DEVICE_CUDA VVAE_DEVICE_CUDA_HOST VVAE_DEVICE_VULKAN
        VVAE_DTYPE_U8 VVAE_DTYPE_U16 VVAE_DTYPE_F16 VVAE_DTYPE_BF16 VVAE_DTYPE_F32
        VVAE_LOG_DEBUG VVAE_LOG_INFO VVAE_LOG_WARNING VVAE_LOG_ERROR VVAE_RUN_HAS_STREAM
        VVAE_TRIM_WORKSPACE VVAE_TRIM_WEIGHTS VVAE_PORT_INPUT VVAE_PORT_OUTPUT
        VVAE_PARAM_INT VVAE_PARAM_FLOAT VVAE_PARAM_BOOL VVAE_PARAM_CHOICE VVAE_PARAM_BYTES VVAE_PARAM_TEXT
        VVAE_PARAM_HAS_AUTO VVAE_PARAM_HAS_RANGE
    }
    out
}

#[test]
fn structs_and_constants_are_the_same_in_c() {
    let out = layout_lines();
    let folder = scratch("layout");
    std::fs::write(folder.join("layout.inc"), out).unwrap();
    let Some(cc) = compiler("CC", "cc") else { return };
    for standard in ["c99", "c17"] {
        let program = folder.join(format!("layout_{standard}"));
        succeeds(compile(&cc, standard, "layout.c").arg("-I").arg(&folder).arg("-o").arg(&program));
        succeeds(&mut Command::new(program));
    }
}

/// Within a major version structs only grow at their end, and constants keep their values.
#[test]
fn layout_only_adds_to_the_committed_one() {
    let path = common::root().join("tests/c/layout.txt");
    let (now, committed) = (layout_lines(), std::fs::read_to_string(&path).unwrap());
    let entries = |text: &str| -> Vec<(String, Vec<u64>)> {
        let entry = |line: &str| {
            let (kind, rest) = line.split_once('(').expect("KIND(NAME, NUMBER...)");
            let parts: Vec<&str> = rest.trim_end_matches(')').split(", ").collect();
            let names = parts.iter().take_while(|part| part.parse::<i64>().is_err());
            let name = names.fold(kind.to_owned(), |all, part| format!("{all} {part}"));
            let numbers = parts.iter().filter_map(|part| part.parse::<i64>().ok());
            (name, numbers.map(i64::cast_unsigned).collect())
        };
        text.lines().map(entry).collect()
    };
    let major = |entries: &[(String, Vec<u64>)]| entries.iter().find(|(name, _)| name.ends_with("ABI_MAJOR")).cloned();
    let (found, before) = (entries(&now), entries(&committed));
    let kept = if major(&found) == major(&before) { before } else { Vec::new() };
    for (name, numbers) in kept {
        let (_, today) = found.iter().find(|(other, _)| *other == name).unwrap_or_else(|| panic!("{name} is gone"));
        match name.split(' ').next() {
            Some("SIZE") => assert!(today >= &numbers, "{name} has shrunk"),
            _ if ["CONSTANT VVAE_ABI_MINOR", "CONSTANT VVAE_ABI_VERSION"].contains(&name.as_str()) => {
                assert!(today >= &numbers, "{name}");
            }
            _ => assert_eq!(*today, numbers, "{name}: offset, size or value"),
        }
    }
    if now != committed && std::env::var_os("VVAE_UPDATE_LAYOUT").is_some_and(|update| update == "1") {
        return std::fs::write(&path, now).unwrap();
    }
    assert!(now == committed, "there is more than in tests/c/layout.txt; if intended, set VVAE_UPDATE_LAYOUT=1");
}

/// Compiles a program against the library, and runs it. It finds the library by its soname.
fn builds_and_runs(compiler: &str, standard: &str, source: &str) {
    let folder = scratch(source);
    let library = common::library_path();
    let beside = library.parent().unwrap();
    let program = folder.join("host");
    let mut command = compile(compiler, standard, source);
    command.arg(&library).arg("-o").arg(&program);
    succeeds(command.arg(format!("-Wl,-rpath,{}", beside.display())));
    succeeds(Command::new(program).arg(common::small()));
}

#[test]
fn c_program_runs() {
    if let Some(cc) = compiler("CC", "cc") {
        builds_and_runs(&cc, "c99", "host.c");
    }
}

#[test]
fn cpp_program_runs() {
    if let Some(cxx) = compiler("CXX", "c++") {
        builds_and_runs(&cxx, "c++17", "host.cpp");
    }
}

/// A host that was built with the header of ABI 1.0.
#[test]
fn host_of_another_major_gets_the_documented_error() {
    if let Some(cc) = compiler("CC", "cc") {
        builds_and_runs(&cc, "c99", "abi_1_0/host.c");
    }
}

/// A host that was built with the header of this major's first version.
#[test]
fn host_of_an_earlier_minor_runs() {
    if let Some(cc) = compiler("CC", "cc") {
        builds_and_runs(&cc, "c99", "abi_2_0/host.c");
    }
}

#[test]
fn structs_are_written_as_far_as_they_reach() {
    if let Some(cc) = compiler("CC", "cc") {
        builds_and_runs(&cc, "c99", "structs.c");
    }
}
