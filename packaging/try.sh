#!/usr/bin/env bash
# Installs and runs every package of target/dist, each in a clean environment. Ends with a table and "N tried, N failed".
# What has no installer here is unpacked and its content is run; the table says what was not tried.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
source "$root/host-examples/windows/settings.sh" # $cc, for Wine's missing library
[ -d "$dist" ] || die "$dist is not there; run packaging/build.sh"
install_tools

place=$work/try
rm -rf "$place"
mkdir -p "$place"
table=$place/table
tried=0 failed=0
# check WHAT COMMAND...: one line of the table, with the seconds it took. What it printed is shown when it fails.
check() {
    local what=$1 start=$SECONDS
    shift
    tried=$((tried + 1))
    if "$@" >"$place/log" 2>&1; then
        printf '%-72s ok      %3d s\n' "$what" $((SECONDS - start)) | tee -a "$table"
    else
        failed=$((failed + 1))
        printf '%-72s FAILED  %3d s\n' "$what" $((SECONDS - start)) | tee -a "$table"
        tail -n 30 "$place/log" | sed 's/^/    /'
    fi
}
not_tried() { printf 'not tried: %s\n' "$*" | tee -a "$table"; }
# Nothing of this shell's environment but where programs are.
clean() { env -i PATH=/usr/bin:/bin HOME="$place/home" LC_ALL=C.UTF-8 TMPDIR="$place" "$@"; }
mkdir -p "$place/home"

linux_wheel=$(echo "$dist"/*-manylinux*_x86_64.whl)
windows_wheel=$(echo "$dist"/*-win_amd64.whl)
archive=$dist/video-vae-$version-linux-x86_64.tar.gz
windows_archive=$dist/video-vae-$version-windows-x86_64.zip
package=$dist/VideoVae.$version.nupkg

pip_install_and_demo() {
    cd "$place" && clean python3 -m venv env && mkdir folder && cd folder &&
        clean "$place/env/bin/pip" install -q --disable-pip-version-check "$linux_wheel" &&
        clean "$place/env/bin/vvae" demo && [ -s vvae-demo/contact-sheet.png ]
}
python_runs() {
    cd "$place/folder" && clean "$place/env/bin/python" - <<'PY'
import pathlib
import numpy
import video_vae
demo = pathlib.Path(video_vae.__file__).parent / "demo.safetensors"
with video_vae.VideoVae(demo, "cpu") as vae:
    latent = vae.encode(numpy.full((5, 64, 64, 3), 99, "u1"))
    assert vae.decode(latent).shape == (1, 3, 5, 64, 64)
PY
}
manylinux() {
    "$tools/bin/auditwheel" show "$linux_wheel" && "$tools/bin/python" - "$work/stage/linux" <<'PY'
import pathlib, re, sys
for file in pathlib.Path(sys.argv[1]).iterdir():
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_([0-9]+\.[0-9]+)", file.read_bytes())}
    assert versions and max(versions) <= (2, 28), (file, max(versions))
    print(file.name, "needs glibc", max(versions))
PY
}
unpack_archive() {
    tar -C "$place" -xzf "$archive" && cd "$place" && mv "video-vae-$version-linux-x86_64" prefix &&
        readelf -d "prefix/lib/libvideo_vae.so" | grep -F "[$soname]" && [ -L prefix/lib/$soname ] &&
        [ -s prefix/share/doc/video-vae/THIRD-PARTY.md ]
}
archive_demo() { mkdir -p "$place/elsewhere" && cd "$place/elsewhere" && clean "$place/prefix/bin/vvae" demo --shape 5x128x128; }
# pkg-config and CMake, and the programs start with an empty environment.
pkg_config_consumer() {
    local flags
    flags=$(PKG_CONFIG_PATH=$place/prefix/lib/pkgconfig pkg-config --cflags --libs video_vae) || return 1
    # shellcheck disable=SC2086
    cc -std=c99 "$root/tests/c/host.c" $flags -o "$place/host_c" && clean "$place/host_c" "$root/tests/golden/small.safetensors"
}
cmake_consumer() {
    mkdir -p "$place/consumer" && cat >"$place/consumer/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.16)
project(consumer LANGUAGES CXX)
find_package(video_vae REQUIRED)
add_executable(host $root/tests/c/host.cpp)
target_compile_features(host PRIVATE cxx_std_17)
target_link_libraries(host PRIVATE video_vae::video_vae)
install(TARGETS host)
CMAKE
    cmake -S "$place/consumer" -B "$place/consumer/build" -DCMAKE_PREFIX_PATH="$place/prefix" \
        -DCMAKE_INSTALL_PREFIX="$place/consumer/installed" && cmake --build "$place/consumer/build" &&
        cmake --install "$place/consumer/build" &&
        clean "$place/consumer/installed/bin/host" "$root/tests/golden/small.safetensors"
}

unpack_package() {
    mkdir -p "$place/nuget" && cd "$place/nuget" && python3 -m zipfile -e "$package" . &&
        python3 - <<'PY'
import xml.etree.ElementTree as tree
for name in ("VideoVae.nuspec", "[Content_Types].xml", "_rels/.rels"):
    tree.parse(name)
PY
}
# As `dotnet build` lays it out: the wrapper beside the program, native libraries under runtimes, a deps.json that says so.
dotnet_core() {
    local app=$place/dotnet runtime libraries=() name framework
    framework=$(framework)
    runtime=$(dirname "$(dirname "$(dirname "$framework")")")
    mkdir -p "$app" && cp -r "$place/nuget/lib/netstandard2.1/VideoVae.dll" "$place/nuget/runtimes" "$app" || return 1
    for name in System.Private.CoreLib System.Runtime System.Console System.Linq System.Collections System.Threading System.Memory \
        System.Runtime.Extensions netstandard; do
        libraries+=("-r:$framework/$name.dll")
    done
    mcs -unsafe -nowarn:1702 -nostdlib -noconfig "${libraries[@]}" -r:"$app/VideoVae.dll" -out:"$app/sample.dll" \
        "$root"/host-examples/csharp/Sample/*.cs &&
        cat >"$app/sample.runtimeconfig.json" <<JSON &&
{ "runtimeOptions": { "framework": { "name": "Microsoft.NETCore.App", "version": "$(basename "$framework")" },
  "configProperties": { "System.Globalization.Invariant": true } } }
JSON
        cat >"$app/sample.deps.json" <<JSON &&
{ "runtimeTarget": { "name": ".NETCoreApp,Version=v3.1" },
  "targets": { ".NETCoreApp,Version=v3.1": {
    "sample/1.0.0": { "dependencies": { "VideoVae": "$version" }, "runtime": { "sample.dll": {} } },
    "VideoVae/$version": { "runtime": { "VideoVae.dll": {} },
      "runtimeTargets": { "runtimes/linux-x64/native/libvideo_vae.so": { "rid": "linux-x64", "assetType": "native" } } } } },
  "libraries": { "sample/1.0.0": { "type": "project", "serviceable": false, "sha512": "" },
    "VideoVae/$version": { "type": "project", "serviceable": false, "sha512": "" } } }
JSON
        clean "$runtime/dotnet" "$app/sample.dll" roundtrip "$root/host-examples/assets/demo.safetensors" 5 64 64
}
# mono finds a .NET Standard assembly through a facade, which Debian has in mono-devel.
mono_runs() {
    local app=$place/mono facade=/usr/lib/mono/4.5/Facades/netstandard.dll
    mkdir -p "$app" && cp "$place/nuget/lib/netstandard2.1/VideoVae.dll" "$place/nuget/runtimes/linux-x64/native/libvideo_vae.so" "$app"
    if [ ! -e $facade ]; then
        (cd "$app" && apt-get download -qq mono-devel && dpkg -x mono-devel*.deb facade) || return 1
        facade=$app/facade$facade
        cp "$facade" "$app"
    fi
    mcs -unsafe -r:"$facade" -r:"$app/VideoVae.dll" -out:"$app/sample.exe" "$root"/host-examples/csharp/Sample/*.cs &&
        clean mono "$app/sample.exe" roundtrip "$root/host-examples/assets/demo.safetensors" 5 64 64
}

# wine PROGRAM WORDS...: from a clean folder.
in_wine() {
    # A subshell, as Wine's variables are its own. The stub is found through the path and never beside the library.
    (
        export WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml=" WINEPREFIX=$place/wine WINEPATH=Z:${place//\//\\}\\stub
        timeout 300 "$wine" "$@"
    )
}
windows_archive_demo() {
    mkdir -p "$place/windows" "$place/stub" "$place/wine" && cd "$place/windows" && python3 -m zipfile -e "$windows_archive" . &&
        $cc -shared -O2 "$root/host-examples/windows/processprng.c" -ladvapi32 -o "$place/stub/bcryptprimitives.dll" &&
        in_wine "video-vae-$version-windows-x86_64/bin/vvae.exe" demo --shape 5x64x64 --device cpu &&
        [ -s vvae-demo/contact-sheet.png ]
}
windows_wheel_content() {
    mkdir -p "$place/wheel" && cd "$place/wheel" && python3 -m zipfile -e "$windows_wheel" . &&
        in_wine video_vae/vvae.exe demo --shape 1x64x64 --device cpu && cmp video_vae/demo.safetensors "$root/host-examples/assets/demo.safetensors"
}
windows_consumer() {
    local prefix=$place/windows/video-vae-$version-windows-x86_64
    mkdir -p "$place/wincpp" && x86_64-w64-mingw32-g++-posix -std=c++17 -I"$prefix/include" "$root/tests/c/host.cpp" \
        "$prefix/lib/libvideo_vae.dll.a" -static -o "$place/wincpp/host.exe" && cp "$prefix/bin/video_vae.dll" "$place/wincpp" &&
        cd "$place/wincpp" && in_wine host.exe "$root/tests/golden/small.safetensors"
}

sums() { cd "$dist" && sha256sum --quiet -c SHA256SUMS; }

say "Linux"
check "checksums: every file of target/dist" sums
check "wheel: pip install and vvae demo, in an empty environment" pip_install_and_demo
check "wheel: import video_vae, encode, decode" python_runs
check "wheel: manylinux tag, and no symbol of a newer glibc" manylinux
check "archive: soname, links, notices" unpack_archive
check "archive: vvae demo, in another folder" archive_demo
check "archive: C program by pkg-config, no path set" pkg_config_consumer
check "archive: C++ program by find_package, installed, no path set" cmake_consumer
check "NuGet package: manifest and content" unpack_package
check "NuGet package: .NET Core $(basename "$(framework)"), native library by deps.json" dotnet_core
check "NuGet package: mono" mono_runs
not_tried "NuGet package with a NuGet client or a newer .NET: neither can be had here"

say "Windows"
for wine in wine64 wine /usr/lib/wine/wine64 none; do command -v $wine >/dev/null && break; done
if [ ! -e "$windows_archive" ]; then
    not_tried "Windows packages: not built (--no-windows)"
elif [ $wine = none ]; then
    not_tried "Windows packages: no Wine here (apt-get install wine64)"
else
    check "archive: vvae.exe demo under Wine" windows_archive_demo
    check "archive: C++ program by mingw, under Wine" windows_consumer
    check "wheel: unpacked, its vvae.exe demo under Wine" windows_wheel_content
    not_tried "wheel: pip on Windows; no Python for Wine can be had here"
    not_tried "archive and wheel on a real Windows, with MSVC, with a GPU"
fi
echo
cat "$table"
echo "$tried tried, $failed failed"
[ "$failed" = 0 ]
