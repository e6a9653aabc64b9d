#!/usr/bin/env bash
# Compiles the kernels of matrices for AMD's cards, which are not here, and prints what the compiler says: registers, spills, shared
# memory, subgroups that a SIMD unit holds. RADV of Debian 13 compiles for a card that is not there; newer ones do not.
#   tests/vulkan/offline.sh [FAMILY...]      such as navi31 (RX 7900) and gfx1150 (Radeon 890M), which are taken if none is given
# As root, or with libvulkan-dev installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# -gt 0 ] || set -- navi31 gfx1150
[ -e /usr/include/vulkan/vulkan.h ] || apt-get install -y -qq --no-install-recommends libvulkan-dev > /dev/null
export VVAE_VULKAN_DRIVER=$root/target/vulkan-amd VVAE_VULKAN_SUITE=trixie VVAE_VULKAN_LAYERS=off
"$here/run.sh" true
libraries=$VVAE_VULKAN_DRIVER/root/usr/lib/x86_64-linux-gnu
echo "{\"file_format_version\": \"1.0.0\", \"ICD\": {\"library_path\": \"$libraries/libvulkan_radeon.so\", \"api_version\": \"1.4.0\"}}" \
    > "$VVAE_VULKAN_DRIVER/amd.json"
export VK_ICD_FILENAMES=$VVAE_VULKAN_DRIVER/amd.json RADV_DEBUG=shaderstats,nocache
cc -O1 -Wall -Wextra -Werror -o "$VVAE_VULKAN_DRIVER/offline" "$here/offline.c" -lvulkan
spirv=$root/src/backend/vulkan/shaders/spirv
for family in "$@"; do
    RADV_FORCE_FAMILY=$family "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$VVAE_VULKAN_DRIVER/offline" 32 65536 \
        "$spirv/conv_matrix_128.fp16.spv" 128 "$spirv/conv_matrix_96.fp16.spv" 128 "$spirv/conv_matrix_32.fp16.spv" 128 \
        "$spirv/attention_matrix.fp16.spv" 256 2>&1 \
        | grep -E '^==|^Null|VkResult|^VGPRs|^Spilled V|^LDS|^Subgroups|^Instructions|^Code' | sed "s#== $spirv/#== #"
done
