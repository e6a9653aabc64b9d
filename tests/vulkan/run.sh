#!/usr/bin/env bash
# Runs tests on a Vulkan device that is the CPU: lavapipe of a newer Debian, unpacked into a folder and not installed. Debian 12's
# own lacks features that kernels need. The device is vulkan:0, and the validation layers watch it.
#   tests/vulkan/run.sh COMMAND ARGUMENTS     such as: tests/vulkan/run.sh cargo test --release --test model_exact
# VVAE_VULKAN_DRIVER: the folder, 100 MB; target/vulkan if not given. VVAE_VULKAN_SUITE: the Debian; testing if not given.
# VVAE_VULKAN_LAYERS=off: without validation.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${VVAE_VULKAN_DRIVER:-$root/target/vulkan}
suite=${VVAE_VULKAN_SUITE:-testing}

unpack() {
    local mirror apt
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null | grep -v '^#' | grep -oE 'https?://[^ ]+/debian/?' | head -1 || true)
    [ -n "$mirror" ] || { echo "no Debian mirror in the sources of apt" >&2; return 1; }
    mkdir -p "$folder"/apt/{lists/partial,cache/archives/partial} "$folder/root"
    : > "$folder/apt/status"
    echo "deb $mirror $suite main" > "$folder/apt/sources.list"
    apt=(-o "Dir::Etc::sourcelist=$folder/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o "Dir::State::status=$folder/apt/status")
    apt-get "${apt[@]}" update -qq
    apt-get "${apt[@]}" -y -qq --no-install-recommends --download-only install \
        mesa-vulkan-drivers libvulkan1 vulkan-validationlayers > /dev/null
    for deb in "$folder"/apt/cache/archives/*.deb; do dpkg -x "$deb" "$folder/root"; done
    touch "$folder/unpacked"
}

[ -e "$folder/unpacked" ] || unpack
libraries=$(cd "$folder/root/usr/lib/x86_64-linux-gnu" && pwd)
echo "{\"file_format_version\": \"1.0.0\", \"ICD\": {\"library_path\": \"$libraries/libvulkan_lvp.so\", \"api_version\": \"1.4.0\"}}" \
    > "$folder/driver.json"
export VVAE_REQUIRE_VULKAN=1 VK_ICD_FILENAMES=$folder/driver.json
if [ "${VVAE_VULKAN_LAYERS:-on}" = on ]; then
    export VK_LAYER_PATH=$folder/root/usr/share/vulkan/explicit_layer.d VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation
    export VK_KHRONOS_VALIDATION_VALIDATE_SYNC=true
fi
# The driver wants its own C library. Tests look for the library beside the program that the system started.
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$root/tests/vulkan/start.sh $libraries"
if [ "${VVAE_VULKAN_LAYERS:-on}" != on ]; then exec "$@"; fi
# What the layers say is on the output of the program, and a failure.
said=$(mktemp)
trap 'rm -f "$said"' EXIT
"$@" 2>&1 | tee "$said"
! grep -qE "Validation (Error|Warning)|VUID-|SYNC-HAZARD" "$said"
