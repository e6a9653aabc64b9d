// Feeding the tensor cores: what lies in shared memory, and the two threads that fetch it.
#pragma once
#include "conv.cuh"
#include "hopper.cuh"
#include "statistics.cuh"

constexpr int PIXELS = 256;  // of a tile
constexpr int PATCH_STAGES = 2, WEIGHT_STAGES = 6;
constexpr int PATCH_BYTES = 43 * 1024;  // largest patch, 10 x 34 pixels, rounded up to the swizzle's 1024 bytes

struct Shared {
    u8 patch[PATCH_STAGES][PATCH_BYTES];
    u8 weights[WEIGHT_STAGES][WEIGHT_TILE];
    u8 out[2][WEIGHT_TILE];  // [computing warpgroup]: 8 x 16 pixels by 64 channels on their way out
    u64 patch_full[PATCH_STAGES], patch_empty[PATCH_STAGES];
    u64 weights_full[WEIGHT_STAGES], weights_empty[WEIGHT_STAGES];
    float bias[2][4][COLUMNS];  // [computing warpgroup][edge]
    WarpSums<32> sums[2][8];    // [parity of the tile]
};

__device__ __forceinline__ Tile tile_at(const ConvParams& p, int index) {
    return Tile(p, index, p.tile_rows, PIXELS / p.tile_rows);
}

/// First pixel of the 8 x 16 that a computing warpgroup has.
__device__ __forceinline__ int2 group_corner(const ConvParams& p, const Tile& tile, int group) {
    return p.tile_rows == 16 ? make_int2(tile.x, tile.y + 8 * group) : make_int2(tile.x + 16 * group, tile.y);
}

__device__ __forceinline__ void feed_patches(const ConvParams& p, Shared& shared) {
    Ring<PATCH_STAGES> ring;
    for (int index = blockIdx.x; index < Tile::count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        for_each_patch(p, tile, [&](const Step& step) {
            barrier_wait(smem_address(&shared.patch_empty[ring.stage]), ring.parity ^ 1);
            const u32 full = smem_address(&shared.patch_full[ring.stage]);
            barrier_expect(full, step.source.patch_bytes);
            copy_patch(smem_address(shared.patch[ring.stage]), &p.map[step.place], step.chunk * CHUNK,
                       tile.x * step.source.stride + step.plane.dx - p.place[step.place].first,
                       tile.y * step.source.stride + step.plane.dy, step.slot, full);
            ring.next();
        });
    }
}

/// Weights, and after those of a tile its residual: two boxes of 64 channels for each computing warpgroup, as large as
/// a tile of weights each.
constexpr int RESIDUAL_BOXES = 4;

__device__ __forceinline__ void feed_weights(const ConvParams& p, Shared& shared) {
    Ring<WEIGHT_STAGES> ring;
    for (int index = blockIdx.x; index < Tile::count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        for_each_patch(p, tile, [&](const Step& step) {
            const int taps = step.plane.rows * step.plane.cols;
#pragma unroll 1
            for (int tap = 0; tap < taps; ++tap) {
                barrier_wait(smem_address(&shared.weights_empty[ring.stage]), ring.parity ^ 1);
                const u32 full = smem_address(&shared.weights_full[ring.stage]);
                barrier_expect(full, WEIGHT_TILE);
                copy_bulk(smem_address(shared.weights[ring.stage]), step.weights + tap * WEIGHT_TILE, WEIGHT_TILE, full);
                ring.next();
            }
        });
        const int slot = p.frame[tile.frame].residual;
        if (slot < 0) continue;
#pragma unroll 1
        for (int i = 0; i < RESIDUAL_BOXES; ++i) {
            barrier_wait(smem_address(&shared.weights_empty[ring.stage]), ring.parity ^ 1);
            const u32 full = smem_address(&shared.weights_full[ring.stage]);
            const int2 corner = group_corner(p, tile, i / 2);
            barrier_expect(full, WEIGHT_TILE);
            copy_patch(smem_address(shared.weights[ring.stage]), &p.residual_map, tile.column * COLUMNS + i % 2 * CHUNK, corner.x,
                       corner.y, slot, full);
            ring.next();
        }
    }
}
