#!/bin/sh
# Builds and runs the sample (or, as `run.sh tests ...`, the tests) with what there is: the .NET SDK, or else mono.
# The library is target/release's unless VIDEO_VAE_LIBRARY names another. Build it before: cargo build --release
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=$(dirname "${VIDEO_VAE_LIBRARY:-$root/target/release/libvideo_vae.so}")
program=sample
if [ "${1:-}" = tests ]; then
    program=tests
    shift
    [ $# -gt 0 ] || set -- "$root/tests/golden"
fi
export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if command -v dotnet >/dev/null && [ -n "$(dotnet --list-sdks)" ]; then
    case $program in sample) project=Sample ;; *) project=Tests ;; esac
    exec dotnet run -c Release --project "$here/$project" -- "$@"
elif command -v mcs >/dev/null && command -v mono >/dev/null; then
    "$here/build.sh" "$root/target/csharp"
    exec mono "$root/target/csharp/$program.exe" "$@"
fi
echo "neither the .NET SDK nor mono (mcs, mono) is there; on Debian: apt-get install mono-mcs mono-runtime" >&2
exit 1
