#!/usr/bin/env bash
# Runs tests and hosts under sanitizers, on Linux. Each part ends with a line "NAME: no findings".
#
#     tests/sanitizers.sh [hosts] [valgrind] [asan] [tsan] [miri] [gpu]
#
# hosts: C and C++ hosts with gcc's AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer.
# valgrind: memcheck on the C hosts. asan: tests through the ABI, any toolchain.
# tsan, miri: a nightly toolchain with rust-src and miri; tsan builds the standard library along, so that it is
# instrumented too. gpu, only if named: compute-sanitizer on every architecture's kernels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
triple=x86_64-unknown-linux-gnu
work=$CARGO_TARGET_DIR/sanitizers
mkdir -p "$work"
model=tests/golden/small.safetensors
[ $# -gt 0 ] || set -- hosts valgrind asan tsan miri

library() {
    cargo build -q --release --lib
    libraries=$CARGO_TARGET_DIR/release
}

# build NAME COMPILER FLAGS...: a host that is linked with the library.
build() {
    local name=$1
    shift
    "$@" -Wall -Wextra -Iinclude "$libraries/libvideo_vae.so" -Wl,-rpath,"$libraries" -o "$work/$name"
}

hosts() {
    library
    local flags="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
    # shellcheck disable=SC2086
    {
        build host_c cc -std=c99 $flags tests/c/host.c
        build host_cpp c++ -std=c++17 $flags tests/c/host.cpp
        build first_abi cc -std=c99 $flags tests/c/abi_1_0/host.c
        build structs cc -std=c99 $flags tests/c/structs.c
        build roundtrip c++ -std=c++17 $flags host-examples/cpp/roundtrip.cpp
    }
    for host in host_c host_cpp first_abi structs roundtrip; do
        ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 "$work/$host" $model >"$work/$host.log" 2>&1 ||
            { cat "$work/$host.log"; exit 1; }
        echo "$host: ok"
    done
}

valgrind_hosts() {
    library
    build plain_c cc -std=c99 -g tests/c/host.c
    build plain_structs cc -std=c99 -g tests/c/structs.c
    for host in plain_c plain_structs; do
        # Entries of the cancel list are kept for the next handle, so "still reachable" is no leak.
        valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect \
            --errors-for-leak-kinds=definite,indirect "$work/$host" $model
    done
}

asan() {
    # The executable has the sanitizer's functions, and the library that it opens needs them. The command, which one test
    # calls, is not built along.
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Clink-arg=-Wl,--export-dynamic" CARGO_TARGET_DIR=$CARGO_TARGET_DIR/asan \
        cargo test -q --release --no-default-features --target $triple --test abi_misuse --test abi_random \
        --test abi_faults --test abi_discovery --test abi_last_run --test abi_cancel --test fleet \
        --test checkpoint_loading --test tensor_pixels --test run -- --skip the_command_tells
}

tsan() {
    # What several threads share: the handle table, ledgers, thread pool, fleet. Then whole calls.
    local flags="-Zsanitizer=thread -Clink-arg=-Wl,--export-dynamic"
    export TSAN_OPTIONS=halt_on_error=1
    RUSTFLAGS=$flags CARGO_TARGET_DIR=$CARGO_TARGET_DIR/tsan \
        cargo +nightly test -q --release --no-default-features -Zbuild-std --target $triple --lib -- \
        capi:: ledger:: reserve:: pool:: fleet::
    RUSTFLAGS=$flags CARGO_TARGET_DIR=$CARGO_TARGET_DIR/tsan VVAE_SOAK_SECONDS=20 \
        cargo +nightly test -q --release --no-default-features -Zbuild-std --target $triple --test abi_cancel \
        --test abi_misuse --test soak
}

# Files are read, so isolation is off. An allocation that is too large for any machine ends the interpreter.
miri() {
    CARGO_TARGET_DIR=$CARGO_TARGET_DIR/miri MIRIFLAGS=-Zmiri-disable-isolation \
        cargo +nightly miri test -q --no-default-features --lib -- capi:: ir::view reserve ledger pool::tests \
        --skip vectors_that_are_too_large
}

# VVAE_TESTS: a folder with the executables and the library of `cargo test --release --no-run`, where there is no Rust.
gpu() {
    local programs=${VVAE_TESTS:-$CARGO_TARGET_DIR/release/deps}
    [ -n "${VVAE_TESTS:-}" ] || cargo test -q --release --no-run
    local unit exact
    unit=$(find "$programs" -maxdepth 1 -name 'video_vae-*' -executable -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
    exact=$(find "$programs" -maxdepth 1 -name 'model_exact-*' -executable -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
    for arch in ${VVAE_ARCHS:-8.0 8.6 8.9 9.0}; do
        for tool in memcheck racecheck initcheck synccheck; do
            echo "$arch $tool"
            VVAE_REQUIRE_CUDA=1 VVAE_ARCH=$arch compute-sanitizer --tool $tool --error-exitcode 9 "$unit" -q cuda::
            VVAE_REQUIRE_CUDA=1 VVAE_ARCH=$arch compute-sanitizer --tool $tool --error-exitcode 9 "$exact" -q
        done
    done
}

for part in "$@"; do
    case $part in
    hosts | asan | tsan | miri | gpu) $part ;;
    valgrind) valgrind_hosts ;;
    *) echo "$0: no part $part" >&2; exit 2 ;;
    esac
    echo "$part: no findings"
done
