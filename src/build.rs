//! Checks that the committed C header is what the source says, and names the library for the linker.

use std::path::{Path, PathBuf};
use std::{env, fs, process};

/// The sources of the header, in its order.
const SOURCES: [&str; 7] = ["types", "handle", "run", "range", "stream", "state", "discovery"];

fn main() {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed=src/build.rs");
    check_header(&root);
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvideo_vae.so");
        // Unloaded code must not be returned to by a thread that is still ending; staying mapped costs little.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}

fn check_header(root: &Path) {
    let header = root.join("include/video_vae.h");
    println!("cargo:rerun-if-changed=include/video_vae.h");
    println!("cargo:rerun-if-changed=cbindgen.toml");
    println!("cargo:rerun-if-env-changed=VVAE_UPDATE_HEADER");
    let fresh = generate(root);
    let committed = fs::read_to_string(&header).unwrap_or_default().replace("\r\n", "\n");
    if fresh == committed {
        return;
    }
    if env::var_os("VVAE_UPDATE_HEADER").is_some_and(|v| v == "1") {
        fs::write(&header, fresh).unwrap_or_else(|why| fail(&format!("cannot write {}: {why}", header.display())));
        return;
    }
    fail("include/video_vae.h is not what src/capi says. To regenerate it, run: VVAE_UPDATE_HEADER=1 cargo build");
}

fn generate(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml"))
        .unwrap_or_else(|why| fail(&format!("cbindgen.toml: {why}")));
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        let path = format!("src/capi/{source}.rs");
        println!("cargo:rerun-if-changed={path}");
        builder = builder.with_src(root.join(path));
    }
    let bindings = builder.generate().unwrap_or_else(|why| fail(&format!("cbindgen: {why}")));
    let mut text = Vec::new();
    bindings.write(&mut text);
    String::from_utf8(text).unwrap_or_else(|why| fail(&format!("cbindgen: {why}")))
}

fn fail(why: &str) -> ! {
    println!("cargo:warning={why}");
    eprintln!("{why}");
    process::exit(1);
}
