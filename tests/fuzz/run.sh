#!/usr/bin/env bash
# Builds the fuzz targets with coverage and AddressSanitizer, and runs them. Any Rust toolchain will do.
#
#     tests/fuzz/run.sh [--seconds N | --runs N] [--seed N] [--keep FOLDER] [TARGET...]
#
# --keep: a folder for the growing corpus, for several runs. Without it a run begins with the committed one.
# Findings lie in tests/fuzz/artifacts. VVAE_INPUT=FILE tries one file.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
limit=-max_total_time=60 seed=1 keep= targets=()
while [ $# -gt 0 ]; do
    case $1 in
    --seconds) limit=-max_total_time=$2; shift ;;
    --runs) limit=-runs=$2; shift ;;
    --seed) seed=$2; shift ;;
    --keep) keep=$2; shift ;;
    -*) echo "$0: unknown option $1" >&2; exit 2 ;;
    *) targets+=("$1") ;;
    esac
    shift
done
[ "${#targets[@]}" -gt 0 ] || targets=(checkpoint configure plan structs calls)

export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=${VVAE_FUZZ_TARGET_DIR:-$here/target}
export RUSTFLAGS="--cfg fuzzing -Zsanitizer=address"
export RUSTC_WRAPPER=$here/rustc.sh
cargo build --manifest-path "$here/Cargo.toml" --locked --release --target x86_64-unknown-linux-gnu
programs=$CARGO_TARGET_DIR/x86_64-unknown-linux-gnu/release
[ -z "${VVAE_FUZZ_BUILD_ONLY:-}" ] || exit 0

# Freed memory that the sanitizer holds back would hide the growth of the library.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=0:quarantine_size_mb=4:malloc_context_size=0}
status=0
for target in "${targets[@]}"; do
    echo "== $target"
    mkdir -p "$here/artifacts/$target"
    if [ -n "${VVAE_INPUT:-}" ]; then
        "$programs/$target" "$VVAE_INPUT" || status=1
        continue
    fi
    grown=${keep:+$keep/$target}
    grown=${grown:-$(mktemp -d)}
    mkdir -p "$grown"
    # Calls check their own time, in processor time. The timeout is for those that never return. Leaks are counted by
    # tests/process_leaks.rs: here threads that are just starting would be taken for leaks.
    "$programs/$target" "$limit" -seed="$seed" -timeout=300 -detect_leaks=0 -rss_limit_mb=1024 -malloc_limit_mb=512 -max_len=4096 \
        -entropic=0 -reload=0 -reduce_inputs=0 -use_counters=0 \
        -print_final_stats=1 -artifact_prefix="$here/artifacts/$target/" "$grown" "$here/corpus/$target" 2>&1 |
        grep -vE '^#[0-9]+\s+(NEW|REDUCE|RELOAD)' || status=1
    [ -n "$keep" ] || rm -rf "$grown"
done
exit $status
