#!/usr/bin/env bash
# Runs what build.sh made under Wine. Ends with "N passed, N failed".
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

for wine in wine64 wine /usr/lib/wine/wine64 none; do command -v $wine >/dev/null && break; done
[ $wine != none ] || { echo "no Wine; apt-get install wine64" >&2; exit 1; }
for file in video_vae.dll host_c.exe host_cpp.exe expected.exe graph_host.exe roundtrip.exe golden.exe tests/model_exact.exe; do
    [ -e "$out/$file" ] || { echo "$out/$file is not there; run build.sh" >&2; exit 1; }
done
unset CI # what needs a compiler beside it is skipped under Wine
export LC_ALL=C.UTF-8 WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml=" WINEPREFIX=$out/wine
work=$out/work
rm -rf "$work"
mkdir -p "$work" "$out/stub" "$WINEPREFIX"
# Found through the path, so it is never beside the library, and a newer Wine uses its own.
$cc -shared -O2 "$here/processprng.c" -ladvapi32 -o "$out/stub/bcryptprimitives.dll" || exit 1
export WINEPATH=Z:${out//\//\\}\\stub
server=$(command -v wineserver || echo /usr/lib/wine/wineserver)
trap '"$server" -k' EXIT # of this WINEPREFIX only
$wine wineboot -i >"$work/wineboot.log" 2>&1

passed=0 failed=0
# check NAME COMMAND...: one test. What it printed is shown when it fails.
check() {
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -n 40 "$work/log" | sed 's/^/        /'
    fi
}
# run PROGRAM ARGUMENTS: under Wine, within a time.
run() {
    local program=$1
    shift
    timeout 300 $wine "$out/$program.exe" "$@" 2>&1 | tr -d '\r'
}
# says WORDS COMMAND...: it goes well, or, with "fails WORDS", does not, and these words are in what it prints.
says() {
    local words=$1
    shift
    "$@" | tee "$work/said" && grep -qF -- "$words" "$work/said"
}
fails() {
    local words=$1
    shift
    ! "$@" >"$work/said" 2>&1 && cat "$work/said" && grep -qF -- "$words" "$work/said"
}

exports() {
    x86_64-w64-mingw32-objdump -p "$out/video_vae.dll" |
        awk '/^\[Ordinal\/Name Pointer\] Table/ {on = 1; next} on && NF == 0 {exit} on {print $NF}' | sort >"$work/exports"
    diff "$work/exports" <(sort "$root/tests/c/symbols.txt")
}
# Nothing to ship beside it: every library it needs is a part of Windows.
imports() {
    x86_64-w64-mingw32-objdump -p "$out/video_vae.dll" | awk '/DLL Name:/ {print tolower($3)}' | sort -u | tee "$work/imports"
    ! grep -vE '^(kernel32|ntdll|advapi32|msvcrt|ws2_32|userenv|bcrypt|bcryptprimitives|api-ms-win-.*)\.dll$' "$work/imports"
}
# The test under Wine writes what Rust sees on Windows; mingw and Wine say whether C sees the same.
layout() {
    local inc=$CARGO_TARGET_DIR/$triple/tmp/layout/layout.inc
    rm -f "$inc"
    rust_test abi_header structs_and_constants &&
        $cc -std=c99 -Wall -Wextra -Werror -I"$root/include" -I"$(dirname "$inc")" "$root/tests/c/layout.c" -o "$out/layout.exe" &&
        run layout
}
# Their paths have no drive, so it has to be that of the current folder.
rust_test() {
    local name=$1
    shift
    (cd "$root" && run "tests/$name" "$@")
}
golden() {
    mkdir -p "$work/golden" && python3 "$here/golden.py" put "$work/golden" &&
        run golden "$small" "$work/golden" 5 32 48 && python3 "$here/golden.py" compare "$work/golden"
}
# graph CHECKPOINT DEVICE OUT: seven frames of 36 x 20, padded on the way in, cropped on the way out.
graph() {
    cat <<END
{
    "checkpoint": "$1", "device": "$2",
    "nodes": [
        { "id": "clip", "type": "frames_in", "params": { "path": "clip.rgb", "width": 36, "height": 20 } },
        { "id": "enc", "type": "encode" }, { "id": "dec", "type": "decode" },
        { "id": "out", "type": "frames_out", "params": { "path": "$3" } }
    ],
    "links": [["clip.video", "enc.video"], ["enc.latent", "dec.latent"], ["dec.video", "out.video"]]
}
END
}
graphs_agree() {
    run expected "$small" "$work/clip.rgb" "$work/right.rgb" 20 36 && run graph_host "$work/graph.json" &&
        cmp "$work/right.rgb" "$work/out.rgb" && ! cmp -s "$work/clip.rgb" "$work/out.rgb"
}
# The same with letters of no one code page in every path: library, graph, checkpoint, output.
graph_beyond_ascii() {
    run graph_host --library "$abroad/video_vae.dll" "$abroad/graph – ж.json" && cmp "$work/right.rgb" "$abroad/возврат.rgb"
}
# The system's figure, not "unknown".
memory() {
    run graph_host nodes | tee "$work/said"
    grep -E '^device +cpu ' "$work/said" | grep -qvF "17179869184"
}

small=$root/tests/golden/small.safetensors
abroad="$work/prüfung 動画"
mkdir -p "$abroad"
cp "$small" "$abroad/prüfung 動画.safetensors"
cp "$out/video_vae.dll" "$abroad"
python3 -c 'import sys; sys.stdout.buffer.write(bytes((i * 7 + i // 50 + (i % 13) ** 2) % 256 for i in range(7 * 20 * 36 * 3)))' >"$work/clip.rgb"
cp "$work/clip.rgb" "$abroad"
graph "$small" cpu out.rgb >"$work/graph.json"
graph "$small" cuda:0 none.rgb >"$work/cuda.json"
graph "prüfung 動画.safetensors" cpu возврат.rgb >"$abroad/graph – ж.json"

check "the exported symbols are those of tests/c/symbols.txt" exports
check "the library needs nothing but Windows" imports
check "tests/c/host.c" says ok run host_c "$small"
check "tests/c/host.cpp, on video_vae.hpp" says ok run host_cpp "$small"
check "tests/c/layout.c: structs and constants are the same in C" layout
check "golden clip through video_vae.hpp, whole and streamed, within 1e-5" golden
check "roundtrip" says "dB between" run roundtrip "$small"
check "roundtrip, no such file" fails "status -3" run roundtrip "$work/none.safetensors"
check "graph_host shows nodes" says "node    encode: " run graph_host nodes
check "graph_host shows this machine's memory" memory
check "graph_host gives what the C ABI gives" graphs_agree
check "C host, checkpoint beyond ASCII" says ok run host_c "$abroad/prüfung 動画.safetensors"
check "C++ host, checkpoint beyond ASCII" says ok run host_cpp "$abroad/prüfung 動画.safetensors"
check "graph_host, every path beyond ASCII" graph_beyond_ascii
check "cuda:0 without a driver is a plain error" fails "no NVIDIA driver" run graph_host "$work/cuda.json"
for name in ${rust_tests/abi_header/}; do
    check "tests/$name.rs" rust_test $name
done

echo "$passed passed, $failed failed"
[ $failed = 0 ]
