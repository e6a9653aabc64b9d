# What build.sh and test.sh share. Sourced by both.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
triple=x86_64-pc-windows-gnu
out=${VVAE_WINDOWS_OUT:-$root/target/windows} # programs, Wine's files, results
packages="rustc-web cargo-web rust-web-src gcc-mingw-w64-x86-64-posix g++-mingw-w64-x86-64-posix cmake make python3 wine64"

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
release=$CARGO_TARGET_DIR/$triple/release
rust_sources=/usr/lib/rustlib/src/rust/library
cc=x86_64-w64-mingw32-gcc-posix
cxx=x86_64-w64-mingw32-g++-posix
rust_tests="abi_discovery abi_header abi_misuse abi_random checkpoint_loading tensor_pixels model_exact"

# Debian's Rust has no standard library for Windows, but its sources: cargo builds it along. With `test` for the library
# too, or everything would be built once for the library and once for the tests.
cargo_windows() {
    local command=$1
    shift
    RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=$cc \
        /usr/bin/cargo "$command" --manifest-path "$root/Cargo.toml" --locked --release --target $triple \
        -Zbuild-std=std,panic_unwind,test "$@"
}
