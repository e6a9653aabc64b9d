#!/usr/bin/env bash
# Builds the committed library twice, from two clones, and compares the stripped files byte for byte. Both clones have
# the same path, which cargo makes a part of symbol names.
#
#     packaging/reproduce.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for round in first second; do
    git clone -q --no-hardlinks "$root" "$work/clone"
    CARGO_TARGET_DIR=$work/target CARGO_INCREMENTAL=0 \
        cargo build -q --manifest-path "$work/clone/Cargo.toml" --locked --release --lib
    strip -o "$work/$round.so" "$work/target/release/libvideo_vae.so"
    rm -rf "$work/target" "$work/clone"
done
sha256sum "$work"/*.so | sed "s|$work/||"
cmp "$work/first.so" "$work/second.so"
echo "the same bytes twice"
