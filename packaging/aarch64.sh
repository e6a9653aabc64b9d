#!/usr/bin/env bash
# The wheel for Linux on aarch64: cross-compiled on Debian 12 into target/dist, beside what build.sh wrote there, and tried
# under qemu with Debian's Python for arm64, which is unpacked below target/.
#
#     packaging/aarch64.sh [--install]     --install: first get the Debian packages, as root
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
triple=aarch64-unknown-linux-gnu
release=$CARGO_TARGET_DIR/$triple/release
stage=$work/stage/aarch64
place=$work/aarch64
rust_sources=/usr/lib/rustlib/src/rust/library
wanted="rustc-web cargo-web rust-web-src binutils-aarch64-linux-gnu python3-venv qemu-user"
# Of Debian for arm64: what Python and NumPy open.
emulated="libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1 python3.11-minimal
    libpython3.11-minimal libpython3.11-stdlib"

if [ "${1:-}" = --install ]; then
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $wanted
fi
lacking=$(missing /usr/bin/cargo /usr/bin/rustc "$rust_sources" aarch64-linux-gnu-strip python3 qemu-aarch64)
[ -z "$lacking" ] || die "not there:$lacking; as root, --install gets these packages of Debian: $wanted"
install_tools

say "Linux library and command for aarch64, for glibc $glibc"
# Debian's Rust has no standard library for aarch64, but its sources: cargo builds it along.
PATH=$tools/bin:/usr/bin:/bin RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 "$tools/bin/cargo-zigbuild" zigbuild \
    --manifest-path "$root/Cargo.toml" --locked --release --lib --example vvae --target "$triple.$glibc" \
    -Zbuild-std=std,panic_unwind

rm -rf "$stage" "$place"
mkdir -p "$dist" "$stage" "$place"/{lists/partial,cache/archives/partial,debs,root,site,lib}
aarch64-linux-gnu-strip -o "$stage/libvideo_vae.so" "$release/libvideo_vae.so"
aarch64-linux-gnu-strip -o "$stage/vvae" "$release/examples/vvae"
python3 "$packaging/notices.py" "$root" >"$work/stage/THIRD-PARTY.md"

say "Wheel"
rm -f "$dist"/*_aarch64.whl
wheel "manylinux_${glibc/./_}_aarch64" "$stage/libvideo_vae.so" "$stage/vvae"
made=$(echo "$dist"/*_aarch64.whl)
"$tools/bin/twine" check --strict "$made"
# Read to its end first: `grep -q` would close the pipe, and a cut pipe is a failure here.
shown=$("$tools/bin/auditwheel" show "$made")
grep -q "manylinux_${glibc/./_}_aarch64" <<<"$shown" || die "$made needs a newer glibc"
(cd "$dist" && rm -f SHA256SUMS && sha256sum -- * >SHA256SUMS)

say "Under qemu"
arm="-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists=$place/lists -o Dir::Cache=$place/cache"
# shellcheck disable=SC2086
(cd "$place/debs" && apt-get $arm update -qq && apt-get $arm download -qq $emulated)
for package in "$place"/debs/*.deb; do dpkg -x "$package" "$place/root"; done
"$tools/bin/pip" download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 -d "$place" numpy
for package in "$made" "$place"/numpy*.whl; do python3 -m zipfile -e "$package" "$place/site"; done
chmod +x "$place/site/video_vae/vvae"
emulate() { qemu-aarch64 -cpu max -L "$place/root" "$@"; }
"$place/site/video_vae/vvae" --version >/dev/null 2>&1 && die "this machine runs aarch64 itself; nothing was emulated"
emulate "$place/site/video_vae/vvae" --version
emulate "$place/site/video_vae/vvae" roundtrip "$root/host-examples/assets/demo.png" "$place/back.png" --weights demo
PYTHONPATH=$place/site emulate "$place/root/usr/bin/python3.11" "$packaging/aarch64.py"
