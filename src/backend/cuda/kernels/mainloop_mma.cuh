// Mainloop of conv_mma: shared memory, the order of taps, and loads of patches and weights by cp.async.
#pragma once
#include "ampere.cuh"
#include "tile_scheduler.cuh"

constexpr int TILE_ROWS = 8;
constexpr int TILE_COLS = 16;
// f32 products take more registers, so its warps compute 2 rows instead of 4.
constexpr int THREADS_2B = 128;  // 2-byte elements
constexpr int THREADS_4B = 256;  // 4-byte elements
constexpr int THREADS = ELEMENT_BYTES == 4 ? THREADS_4B : THREADS_2B;
constexpr int WARP_CHANNELS = 64;
constexpr int STACKED_WARPS = THREADS / 32 / (TILE_CHANNELS / WARP_CHANNELS);  // warps of one channel range
constexpr int WARP_ROWS = TILE_ROWS / STACKED_WARPS;

constexpr int PATCH_STAGES = 2;
constexpr int WEIGHT_STAGES = 3;
constexpr int PATCH_BYTES = 23040;  // 10 x 18 pixels
constexpr int LOADERS = 128;        // the first 128 threads load patches, the last 128 weights

constexpr int K_STEPS = ROW_BYTES / K_STEP_BYTES;  // products of a tap
// Fragments are double-buffered, except in f32: its operand split takes the registers.
constexpr int FRAGMENT_STAGES = ELEMENT_BYTES == 4 ? 1 : 2;
constexpr int K_UNROLL = ELEMENT_BYTES == 4 ? 1 : K_STEPS;
constexpr int LOAD_UNROLL = FRAGMENT_STAGES;

struct Shared {
    u8 patch[PATCH_STAGES][PATCH_BYTES];
    u8 weights[WEIGHT_STAGES][WEIGHT_TILE_BYTES];
};

/// Position in a tile's sum over (term, K block, plane, tap).
struct TapCursor {
    int term = 0, k_block = 0, plane = 0;
    int taps = 0;  // left in the current patch
    u32 patch_stage = PATCH_STAGES - 1, weight_stage = 0;

    /// Enters the next patch if the current one has no tap left, and calls `enter(source, plane, shortcut)` for it.
    template <class Enter>
    __device__ __forceinline__ void enter_patch(const ConvParams& p, const FrameParams& frame, int phase, Enter enter) {
        if (taps > 0) return;
        const bool shortcut = term == frame.terms;
        const Source& source = p.source[shortcut];
        const Plane& at = source.plane[(shortcut ? 0 : phase * source.planes) + plane];
        patch_stage ^= 1;
        taps = at.rows * at.cols;
        enter(source, at, shortcut);
        if (++plane < source.planes) return;
        plane = 0;
        if (++k_block < source.k_blocks) return;
        k_block = 0;
        ++term;
    }

    __device__ __forceinline__ void next_tap() {
        --taps;
        weight_stage = weight_stage + 1 == WEIGHT_STAGES ? 0 : weight_stage + 1;
    }
};

__device__ __forceinline__ void load_patch(const Source& source, const Plane& plane, const Tile& tile,
                                           const FramePart& part, int slot, int k_block, u32 to) {
    constexpr int PIXELS = LOADERS / 8;  // loaded at once, 8 threads each
    const int unit = threadIdx.x % 8, first = threadIdx.x / 8;
    const int channel = k_block * K_BLOCK + unit * UNIT_CHANNELS;
    const int pitch = source.pitch, pixels = source.rows * pitch, stride = source.stride;
    const int width = part.width, height = source.height, pixel_bytes = source.channels * ELEMENT_BYTES;
    const bool has_channel = channel < source.channels;
    const u8* frame = part.frames + slot * part.slot_bytes + channel * ELEMENT_BYTES;
    const u8* unused = part.frames;                                      // a valid address for copies of zeros
    u32 address = to + first * ROW_BYTES + ((unit ^ (first & 7)) << 4);  // steps of 16 pixels keep the swizzle
    const int left = plane.dx - part.first_column;
    int x = (tile.x + first) * stride + left, y = tile.y * stride + plane.dy;
    const int end = (tile.x + pitch) * stride + left;
#pragma unroll LOAD_UNROLL
    for (int i = first; i < pixels; i += PIXELS) {
        const bool valid = has_channel && static_cast<u32>(x) < width && static_cast<u32>(y) < height;
        const i64 offset = (static_cast<i64>(y) * width + x) * pixel_bytes;
        cp_async_16(address, valid ? frame + offset : unused, valid);
        address += PIXELS * ROW_BYTES;
        x += PIXELS * stride;
        if (x >= end) {
            x -= pitch * stride;
            y += stride;
        }
    }
}

/// Loads a tile's patches and weights, one tap per call.
struct TapLoader {
    const ConvParams& p;
    Shared& shared;
    const Tile& tile;
    const FrameParams& frame;
    TapCursor cursor = {};
    const u8* weights = nullptr;

    __device__ __forceinline__ void load_tap() {
        cursor.enter_patch(p, frame, tile.phase, [&](const Source& source, const Plane& plane, bool shortcut) {
            const int term = shortcut ? SHORTCUT_TERM : cursor.term;
            if (cursor.k_block == 0 && cursor.plane == 0)
                weights =
                    weight_tiles(p, source, shortcut, frame.slab[term], tile) + threadIdx.x % LOADERS * UNIT_BYTES;
            if (threadIdx.x < LOADERS) {
                const InputFrame input = input_frame(p, frame, term, tile);
                load_patch(source, plane, tile, p.part[input.part], input.slot, cursor.k_block,
                           smem_address(shared.patch[cursor.patch_stage]));
            }
        });
        if (threadIdx.x >= THREADS - LOADERS) {
            const u32 to = smem_address(shared.weights[cursor.weight_stage]) + threadIdx.x % LOADERS * UNIT_BYTES;
#pragma unroll
            for (int i = 0; i < WEIGHT_TILE_BYTES; i += LOADERS * UNIT_BYTES) cp_async_16(to + i, weights + i, true);
        }
        weights += WEIGHT_TILE_BYTES;
        cursor.next_tap();
    }
};
