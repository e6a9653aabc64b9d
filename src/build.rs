//! Names the library for the linker.

fn main() {
    println!("cargo:rerun-if-changed=src/build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvideo_vae.so");
        // Unloaded code must not be returned to by a thread that is still ending; staying mapped costs little.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
