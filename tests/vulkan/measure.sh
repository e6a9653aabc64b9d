#!/usr/bin/env bash
# Measures the Vulkan backend on a GPU: goldens, times beside CUDA's kernels for 8.6, and what each kind of operation takes. Every
# step has a time limit and prints at once, so that one that hangs costs little and says which it was.
#   tests/vulkan/measure.sh OUT       with the programs where cargo puts them:
#   cargo build --release --lib --example vvae && cargo test --release --no-run --test model_exact
# DEVICE: vulkan:0 if not given. MODEL: arguments of `vvae bench` that name a checkpoint; --random if not given. SHAPES: of
# video, the smallest first. LIMIT and LONG: a memory limit and a shape for it; nothing if LONG is empty.
# An NVIDIA driver without a display starts through its EGL library alone: libvulkan.so.1 and that library's folder
# have to be in LD_LIBRARY_PATH, and VK_ICD_FILENAMES is made here if it is not set.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
device=${DEVICE:-vulkan:0}
read -ra model <<< "${MODEL:---random}"
read -ra shapes <<< "${SHAPES:-1x256x256 5x256x256 1x1024x1024 21x720x1280}"
vvae=$root/target/release/examples/vvae
# With cargo test --no-run of several versions there are several: the newest.
golden=$(ls -t "$root"/target/release/deps/model_exact-* 2> /dev/null | grep -v '\.d$' | sed -n 1p)
egl=libEGL_nvidia.so.0
if [ -z "${VK_ICD_FILENAMES:-}" ] && ldconfig -p | grep "$egl" >/dev/null; then
    echo "{\"file_format_version\": \"1.0.0\", \"ICD\": {\"library_path\": \"$egl\", \"api_version\": \"1.4.0\"}}" > "$out/driver.json"
    export VK_ICD_FILENAMES=$out/driver.json
fi

# step SECONDS NAME COMMAND...: fails if the command does, or takes longer.
step() {
    echo "== $2"
    timeout "$1" "${@:3}" 2>&1 | tee "$out/$2.log" | grep -v '^$'
    local status=${PIPESTATUS[0]}
    [ "$status" = 0 ] || echo "== $2: status $status (124: not within $1 s)"
    return "$status"
}

bench() { step "$1" "$2" ${RUNNER:-} "$vvae" bench "${model[@]}" --set precision=fp16 "${@:3}"; }

# Seconds of each kind of operation, of all that a trace has.
by_operation() {
    python3 - "$1" << 'PYTHON'
import collections, json, re, sys
events = [event for event in json.load(open(sys.argv[1]))["traceEvents"] if event["ph"] == "X"]
seconds = collections.Counter()
for event in events:
    seconds[event["name"]] += event["dur"] / 1e6
for name, value in seconds.most_common(25):
    print(f"{value:10.4f} s  {name}")
PYTHON
}

[ -z "$golden" ] || step 60 goldens env VVAE_REQUIRE_VULKAN=1 ${RUNNER:-} "$golden" goldens_match_the --nocapture
for shape in "${shapes[@]}"; do
    # What is slow for a small shape is slower for a large one.
    bench 30 "decode-$shape" --device "$device" --shapes "$shape" --ops decode || break
    bench 30 "encode-$shape" --device "$device" --shapes "$shape" --ops encode || break
    trace=$out/trace-$shape.json
    bench 30 "traced-$shape" --device "$device" --shapes "$shape" --ops decode --repeat 1 --set "trace=$trace" && by_operation "$trace"
    [ "${CUDA:-on}" = off ] || VVAE_ARCH=8.6 bench 30 "cuda-$shape" --device cuda:0 --shapes "$shape"
done
VVAE_VULKAN_MATRICES=off bench 30 "plain-${shapes[0]}" --device "$device" --shapes "${shapes[0]}" --ops decode
long=${LONG-81x1080x1920}
if [ -n "$long" ]; then
    bench 90 "long-$long" --device "$device" --shapes "$long" --ops decode --repeat 1
    bench 90 "limited-$long" --device "$device" --shapes "$long" --ops decode --repeat 1 --set "memory_limit=${LIMIT:-6GiB}"
fi
