#!/bin/sh
# Installs library, headers, CMake package and pkg-config file:  install.sh PREFIX [LIBRARY]
# LIBRARY is target/release's unless named. Build it before: cargo build --release
set -eu
if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 PREFIX [LIBRARY]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cmake -S "$here" -B "$build" -DVIDEO_VAE_BUILD_HOSTS=OFF -DCMAKE_INSTALL_PREFIX="$1" -DCMAKE_INSTALL_LIBDIR=lib \
    ${2:+"-DVIDEO_VAE_LIBRARY=$2"} >/dev/null
cmake --install "$build"
