#!/usr/bin/env bash
# video_vae.dll for Windows, the C and C++ hosts and the ABI tests, on Debian.
#
#     host-examples/windows/build.sh [--install]     --install: first get the packages with apt-get, as root
#
# The library ends in target/x86_64-pc-windows-gnu/release, the programs in target/windows.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

if [ "${1:-}" = --install ]; then
    apt-get update
    # shellcheck disable=SC2086
    apt-get install -y --no-install-recommends $packages
fi
for tool in /usr/bin/cargo /usr/bin/rustc "$rust_sources" $cc $cxx cmake; do
    [ -e "$tool" ] || command -v "$tool" >/dev/null || {
        echo "$tool is not there; run this script with --install, or: apt-get install $packages" >&2
        exit 1
    }
done
/usr/bin/rustc --version

mkdir -p "$out/tests"
# shellcheck disable=SC2086
cargo_windows test --no-run $(printf -- ' --test %s' $rust_tests) 2>&1 | tee "$out/tests/list"
# They open the library one folder up from their own.
sed -nE 's|^ *Executable tests/(.*)\.rs \((.*)\)$|\1 \2|p' "$out/tests/list" | while read -r name program; do
    cp "$program" "$out/tests/$name.exe"
done
cargo_windows build --lib

warnings="-Wall -Wextra -pedantic -Werror"
link="$release/libvideo_vae.dll.a -static"
# Programs with a `main` of characters get their arguments in UTF-8.
$cc -O2 -c "$here/utf8_main.c" -o "$out/utf8_main.o"
utf8="$out/utf8_main.o -Wl,--wrap=main"
# shellcheck disable=SC2086
{
    $cc -std=c99 $warnings -I"$root/include" "$root/tests/c/host.c" $utf8 $link -o "$out/host_c.exe"
    $cxx -std=c++17 $warnings -I"$root/include" "$root/tests/c/host.cpp" $utf8 $link -o "$out/host_cpp.exe"
    $cxx -std=c++17 $warnings -I"$root/include" "$here/expected.cpp" $link -o "$out/expected.exe"
}

cmake -S "$root/host-examples/cpp" -B "$out/cpp" -DCMAKE_SYSTEM_NAME=Windows -DCMAKE_CXX_COMPILER=$cxx \
    -DCMAKE_CXX_FLAGS=-Werror -DVIDEO_VAE_LIBRARY="$release/video_vae.dll"
cmake --build "$out/cpp" --target all golden
cp "$release/video_vae.dll" "$out"
cp "$out"/cpp/*.exe "$out"
ls -l "$out"/*.dll "$out"/*.exe
