// Mainloop of conv_wgmma, conv_wgmma_96 and conv_wgmma_down: shared memory, the two producer threads that fill it, and the products of
// the consumers.
#pragma once
#include "hopper.cuh"
#include "statistics.cuh"

constexpr int TILE_PIXELS = 256;
constexpr int CONSUMERS = 2;  // warpgroups that compute
// Pixels of a consumer warpgroup. Boxes of the residual and output tensor maps have this size too.
constexpr int GROUP_ROWS = 8;
constexpr int GROUP_COLS = 16;
constexpr int BLOCK_COLS = 8;               // a block of 8 x 8 pixels is one product

/// Boxes of a consumer's pixels by `Widths::CHANNELS` channels.
template <class Widths>
struct Boxes {
    static constexpr int COUNT = Widths::COLUMNS / Widths::CHANNELS;              // of a tile
    static constexpr int BYTES = GROUP_ROWS * GROUP_COLS * Widths::ROW;           // of 8 x 16 pixels
    static constexpr int GROUPS = Widths::CHANNELS / 32;                          // of 32 channels
    static constexpr int STAGE_BYTES = BYTES > Widths::BYTES ? BYTES : Widths::BYTES;  // a box, or a tile of weights

    /// The place of a unit in a row of a swizzled box, for the pixel of a lane that holds every eighth one.
    static __device__ __forceinline__ int place(int unit, int lane) {
        return (unit ^ (Widths::ROW == 128 ? lane % 8 : lane % 8 / 2)) * UNIT_BYTES;
    }
};

/// `DOWN`: for the window Down. Its patches serve few taps, so three are in flight. Its sums may start from partial
/// sums of another launch, and may be stored as such.
template <class Widths_, bool DOWN>
struct ConvShared {
    using Widths = Widths_;
    static constexpr bool WIDE = Widths::ROW == 128;
    static constexpr bool STATISTICS = WIDE;
    static constexpr int FRAMES = 1;
    static constexpr bool BY_COLUMNS = false;
    static constexpr int PATCH_STAGES = DOWN ? 3 : WIDE ? 2 : 4;
    static constexpr int WEIGHT_STAGES = DOWN ? 4 : WIDE ? 6 : 10;
    // 9 x 33 or 10 x 34 pixels, rounded up to 8 rows of the swizzle.
    static constexpr int PATCH_BYTES = (DOWN ? 38 : 43) * 8 * Widths::ROW;
    static constexpr int STAGED_BOXES = WIDE ? 1 : 3;  // of the output
    static constexpr int EDGES = 4;                    // each has a bias

    u8 patch[PATCH_STAGES][PATCH_BYTES];
    u8 weights[WEIGHT_STAGES][Boxes<Widths>::STAGE_BYTES];  // weight tiles, then the residual boxes of a tile
    u8 out[CONSUMERS][STAGED_BOXES * Boxes<Widths>::BYTES];  // for the TMA store
    // Consumers wait for `full`: the copy has arrived. The producer waits for `empty`: all consumer warps are done.
    u64 patch_full[PATCH_STAGES], patch_empty[PATCH_STAGES];
    u64 weights_full[WEIGHT_STAGES], weights_empty[WEIGHT_STAGES];
    float bias[CONSUMERS][EDGES][Widths::COLUMNS];  // [warpgroup][edge]

    static __device__ __forceinline__ void release_weights(u32 barrier, int lane) {
        if (lane == 0) mbarrier_arrive(barrier);
    }
};

__device__ __forceinline__ Tile tile_at(const ConvParams& p, int index) {
    return Tile(p, index, p.tile_rows, TILE_PIXELS / p.tile_rows);
}

/// First pixel of a consumer warpgroup. They are stacked in tiles of 16 x 16 pixels, side by side in tiles of 8 x 32.
__device__ __forceinline__ int2 group_corner(const ConvParams& p, const Tile& tile, int group) {
    return p.tile_rows == 16 ? make_int2(tile.x, tile.y + GROUP_ROWS * group)
                             : make_int2(tile.x + GROUP_COLS * group, tile.y);
}

template <class Widths, bool DOWN>
__device__ __forceinline__ void produce_patches(const ConvParams& p, ConvShared<Widths, DOWN>& shared) {
    PipelineState<ConvShared<Widths, DOWN>::PATCH_STAGES> pipe;
    for (int index = blockIdx.x; index < Tile::count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        for_each_patch<Widths>(p, tile, [&](const PatchStep& step) {
            mbarrier_wait(smem_address(&shared.patch_empty[pipe.stage]), pipe.parity ^ 1);
            const u32 full = smem_address(&shared.patch_full[pipe.stage]);
            mbarrier_arrive_expect_tx(full, step.source.patch_bytes);
            tma_load_4d(smem_address(shared.patch[pipe.stage]), &p.input_map[step.input.part],
                        step.k_block * Widths::CHANNELS,
                        tile.x * step.source.stride + step.plane.dx - p.part[step.input.part].first_column,
                        tile.y * step.source.stride + step.plane.dy, step.input.slot, full);
            pipe.advance();
        });
    }
}

/// Weights of a tile, then its residual.
template <class Widths, bool DOWN>
__device__ __forceinline__ void produce_weights(const ConvParams& p, ConvShared<Widths, DOWN>& shared) {
    PipelineState<ConvShared<Widths, DOWN>::WEIGHT_STAGES> pipe;
    for (int index = blockIdx.x; index < Tile::count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        for_each_patch<Widths>(p, tile, [&](const PatchStep& step) {
            const int taps = step.plane.rows * step.plane.cols;
#pragma unroll 1
            for (int tap = 0; tap < taps; ++tap) {
                mbarrier_wait(smem_address(&shared.weights_empty[pipe.stage]), pipe.parity ^ 1);
                const u32 full = smem_address(&shared.weights_full[pipe.stage]);
                mbarrier_arrive_expect_tx(full, Widths::BYTES);
                bulk_load(smem_address(shared.weights[pipe.stage]), step.weights + tap * Widths::BYTES, Widths::BYTES,
                          full);
                pipe.advance();
            }
        });
        const int slot = p.frame[tile.frame].residual;
        if (slot < 0) continue;
#pragma unroll 1
        for (int i = 0; i < CONSUMERS * Boxes<Widths>::COUNT; ++i) {
            mbarrier_wait(smem_address(&shared.weights_empty[pipe.stage]), pipe.parity ^ 1);
            const u32 full = smem_address(&shared.weights_full[pipe.stage]);
            const int2 corner = group_corner(p, tile, i / Boxes<Widths>::COUNT);
            mbarrier_arrive_expect_tx(full, Boxes<Widths>::BYTES);
            tma_load_4d(smem_address(shared.weights[pipe.stage]), &p.residual_map[0],
                        tile.channel_tile * Widths::COLUMNS + i % Boxes<Widths>::COUNT * Widths::CHANNELS, corner.x,
                        corner.y, slot, full);
            pipe.advance();
        }
    }
}

/// The consumer's side of both pipelines.
template <class Shared>
struct ConsumerPipelines {
    Shared& shared;
    int group, lane;
    PipelineState<Shared::PATCH_STAGES> patches = {};
    PipelineState<Shared::WEIGHT_STAGES> weights = {};
    // `empty` barriers to arrive at once the products in flight have read the stage.
    u32 used_weights = 0, used_patch = 0;

    __device__ __forceinline__ void release_used() {
        if (used_weights) Shared::release_weights(used_weights, lane);
        if (lane == 0 && used_patch) mbarrier_arrive(used_patch);
        used_weights = used_patch = 0;
    }

    /// Waits for all products.
    __device__ __forceinline__ void drain() {
        wgmma_wait<0>();
        release_used();
    }
};

template <class Widths, bool DOWN>
struct ConvMainloop : ConsumerPipelines<ConvShared<Widths, DOWN>> {
    static constexpr int ROW = Widths::ROW, NEXT_PIXEL = ROW / 16;  // next row of a matrix, in units of its descriptor
    using Sums = float[2][Widths::COLUMNS / 2];
    using Pipelines = ConsumerPipelines<ConvShared<Widths, DOWN>>;
    using Pipelines::group, Pipelines::patches, Pipelines::shared, Pipelines::used_patch, Pipelines::used_weights,
        Pipelines::weights;

    /// Adds the products of all taps of a patch. Those of `IN_FLIGHT` taps may be in flight.
    template <int IN_FLIGHT>
    __device__ __forceinline__ void add_patch(const ConvParams& p, const PatchStep& step, int& scale_d, Sums& acc) {
        const u64 weights_descriptor = matrix_descriptor<ROW>(8 * ROW);
        const int pitch = step.source.pitch, rows = step.plane.rows, cols = step.plane.cols;
        const int first = group * (p.tile_rows == 16 ? GROUP_ROWS * pitch : GROUP_COLS);
        u64 a =
            matrix_at(matrix_descriptor<ROW>(pitch * ROW), smem_address(shared.patch[patches.stage]) + first * ROW);
        mbarrier_wait(smem_address(&shared.patch_full[patches.stage]), patches.parity);
        for (int row = 0; row < rows; ++row, a += (pitch - cols) * NEXT_PIXEL)
            for (int col = 0; col < cols; ++col, a += NEXT_PIXEL) {
                const u64 b = matrix_at(weights_descriptor, smem_address(shared.weights[weights.stage]));
                mbarrier_wait(smem_address(&shared.weights_full[weights.stage]), weights.parity);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < Widths::CHANNELS / 16; ++k) {
                    wgmma_k16(acc[0], a + 2 * k, b + 2 * k, scale_d);
                    wgmma_k16(acc[1], a + 2 * k + BLOCK_COLS * NEXT_PIXEL, b + 2 * k, scale_d);
                    scale_d = 1;
                }
                wgmma_commit();
                wgmma_wait<IN_FLIGHT>();
                this->release_used();
                used_weights = smem_address(&shared.weights_empty[weights.stage]);
                weights.advance();
            }
        used_patch = smem_address(&shared.patch_empty[patches.stage]);
        patches.advance();
    }

    /// The sum of a tile's products. With `DOWN` it starts from `acc`. Then plain instructions have written `acc`, and
    /// ptxas would serialise products in flight across taps (C7515). So the taps of the first patch are waited for.
    __device__ __forceinline__ void accumulate(const ConvParams& p, const Tile& tile, Sums& acc) {
        int scale_d = DOWN ? 1 : 0;  // 0: the first product overwrites `acc`
        if constexpr (DOWN) add_patch<0>(p, first_patch(p, tile), scale_d, acc);
        for_each_patch<Widths>(
            p, tile, [&](const PatchStep& step) { add_patch<1>(p, step, scale_d, acc); }, DOWN ? 1 : 0);
        this->drain();
    }
};
