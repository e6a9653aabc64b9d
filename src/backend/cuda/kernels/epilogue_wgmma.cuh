// Epilogue of conv_wgmma, for a consumer warpgroup's 8 x 16 pixels of a frame, or 8 x 8 of each frame of a pair, by 128
// or 96 channels: bias or partial sums, residual, one rounding, TMA store, statistics. Kept short, because the tensor cores
// may idle meanwhile.
#pragma once
#include "epilogue.cuh"
#include "mainloop_wgmma.cuh"
#include "statistics_wgmma.cuh"

template <class Shared>
struct EpilogueWgmma {
    static constexpr int BLOCKS = 2 / Shared::FRAMES;  // of 8 x 8 pixels, side by side, in each frame
    static constexpr int PIXELS = 2 * BLOCKS;          // of a lane in each frame
    using Widths = typename Shared::Widths;
    static constexpr int COLUMNS = Widths::COLUMNS, ROW = Widths::ROW, BOX_CHANNELS = Widths::CHANNELS;
    static constexpr int BOXES = Boxes<Widths>::COUNT, GROUPS = Boxes<Widths>::GROUPS;
    static constexpr int OUT_BYTES = 8 * 8 * BLOCKS * ROW;
    static constexpr int OUT_BOXES = sizeof(Shared::out[0]) / OUT_BYTES;  // staged at a time
    using Sums = float[BLOCKS][COLUMNS / 2];                              // of one frame
    using WeightPipe = PipelineState<Shared::WEIGHT_STAGES>;

    const ConvParams& p;
    Shared& shared;
    const Tile& tile;
    int group, warp, lane;
    int2 corner;

    /// Pixel i of this lane. A warp has two rows of 8 pixels in each block.
    __device__ __forceinline__ int2 pixel_of(int i) const {
        return make_int2(corner.x + 8 * (i / 2) + lane / 4, corner.y + 2 * warp + i % 2);
    }

    static __device__ __forceinline__ float& value(Sums& acc, int i, int block, int e) {
        return acc[i / 2][4 * block + 2 * (i % 2) + e];
    }

    /// Columns of a view of the frame.
    __device__ __forceinline__ int width_of(int view) const {
        return Shared::BY_COLUMNS ? p.width - (view ? p.missing_columns : 0) : p.width;
    }

    /// Named barrier of this warpgroup. Barrier 0 is __syncthreads.
    __device__ __forceinline__ void sync_warpgroup() const { named_barrier(1 + group, 128); }

    /// Starts the sums from partial sums of another launch, or from zero.
    __device__ __forceinline__ void load_partial(Sums& acc) const {
        const float* partial = tile_partial_in(p, tile);
        const int channel = tile.channel_tile * COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int offset = partial ? partial_offset(p, tile, pixel_of(i)) : -1;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; ++block) {
                const bool inside = offset >= 0 && channel + 8 * block < p.cout;
                const float2 v =
                    inside ? load_pair_readonly(partial + (offset + channel + 8 * block)) : make_float2(0, 0);
                value(acc, i, block, 0) = v.x, value(acc, i, block, 1) = v.y;
            }
        }
    }

    /// Stores the sums as partial sums for another launch. Returns false if this launch finishes the tile.
    __device__ __forceinline__ bool store_partial(Sums& acc) const {
        float* partial = tile_partial_out(p, tile);
        if (!partial) return false;
        const int channel = tile.channel_tile * COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int offset = partial_offset(p, tile, pixel_of(i));
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; ++block)
                if (offset >= 0 && channel + 8 * block < p.cout)
                    store_pair(partial + (offset + channel + 8 * block), value(acc, i, block, 0),
                               value(acc, i, block, 1));
        }
        return true;
    }

    /// Starts the copy of the bias, to overlap with the mainloop. All threads have read the previous tile's bias.
    __device__ __forceinline__ void prefetch_bias(const FrameParams& frame) const {
        const int edges = p.phases == 4 ? 4 : 1, channel = warp * 32 + lane;
        if (COLUMNS < 128 && channel >= COLUMNS) return;
        for (int edge = 0; edge < edges; ++edge)
            cp_async_4(smem_address(&shared.bias[group][edge][channel]),
                       bias_of<Widths>(p, frame, tile, edge) + tile.channel_tile * COLUMNS + channel);
    }

    __device__ __forceinline__ void wait_bias() const {
        cp_async_wait_all();
        sync_warpgroup();
    }

    __device__ __forceinline__ void add_bias(Sums& acc) const {
        const int edges = p.phases == 4 ? 4 : 1;
        const float (*bias)[COLUMNS] = shared.bias[group];
#pragma unroll
        for (int block = 0; block < COLUMNS / 8; ++block) {
            const float2 v = *reinterpret_cast<const float2*>(&bias[0][8 * block + lane % 4 * 2]);
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) value(acc, i, block, 0) += v.x, value(acc, i, block, 1) += v.y;
        }
        if (edges == 1) return;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int edge = bias_edge(p, tile, pixel_of(i));
            if (edge == 0) continue;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; ++block)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int channel = 8 * block + lane % 4 * 2 + e;
                    value(acc, i, block, e) += bias[edge][channel] - bias[0][channel];
                }
        }
    }

    /// Waits for a residual box and releases it.
    __device__ __forceinline__ void skip_residual_box(WeightPipe& pipe) const {
        mbarrier_wait(smem_address(&shared.weights_full[pipe.stage]), pipe.parity);
        __syncwarp();
        shared.release_weights(smem_address(&shared.weights_empty[pipe.stage]), lane);
        pipe.advance();
    }

    /// All boxes of the other warpgroup.
    __device__ __forceinline__ void skip_residual(WeightPipe& pipe) const {
#pragma unroll
        for (int box = 0; box < BOXES; ++box) skip_residual_box(pipe);
    }

    /// With two frames in registers, the compiler must not delay a sum and hold the residual meanwhile.
    static __device__ __forceinline__ void add_residual_to(float& x, float residual) {
        if (Shared::FRAMES == 2) add_now(x, residual);
        else x += residual;
    }

    /// Adds all boxes of a tile. The consumers of a pair of frames read half of each box.
    __device__ __forceinline__ void add_residual(Sums& acc, WeightPipe& pipe) const {
        const int first = 2 * warp * GROUP_COLS + (Shared::FRAMES == 2 ? BLOCK_COLS * group : 0);
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            mbarrier_wait(smem_address(&shared.weights_full[pipe.stage]), pipe.parity);
            const u32 pixels = smem_address(shared.weights[pipe.stage]) + (first + lane % 8) * ROW;
#pragma unroll
            for (int i = 0; i < PIXELS; ++i)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    u32 x[4];  // of 32 channels
                    ldmatrix_x4(x, pixels + (i % 2 * GROUP_COLS + i / 2 * BLOCK_COLS) * ROW +
                                       Boxes<Widths>::place(4 * g + lane / 8, lane));
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        const float2 v = unpack2(x[b]);
                        const int block = BOX_CHANNELS / 8 * box + 4 * g + b;
                        add_residual_to(value(acc, i, block, 0), v.x);
                        add_residual_to(value(acc, i, block, 1), v.y);
                    }
                }
            skip_residual_box(pipe);
        }
    }

    /// Rounds and stores as many boxes at a time as there is room for. Writes mean and M2 of each quad
    /// of rounded values to `moments`, unless it is null. `view`: 1 for odd columns.
    __device__ __forceinline__ void store(Sums& acc, const FrameParams& frame, float2* moments, int view = 0) const {
        constexpr int BOX_BLOCKS = BOX_CHANNELS / 8;
        const bool storing_thread = warp == 0 && lane == 0;
#pragma unroll
        for (int first = 0; first < BOXES; first += OUT_BOXES) {
            u32 x[OUT_BOXES][GROUPS][PIXELS][4];  // [box][32 channels][pixel][8 channels]
#pragma unroll
            for (int i = 0; i < PIXELS; ++i)
#pragma unroll
                for (int block = 0; block < BOX_BLOCKS * OUT_BOXES; ++block)
                    x[block / BOX_BLOCKS][block / 4 % GROUPS][i][block % 4] =
                        pack2(value(acc, i, BOX_BLOCKS * first + block, 0), value(acc, i, BOX_BLOCKS * first + block, 1));
            const u32 boxes = smem_address(shared.out[group]);
            if (storing_thread) tma_store_wait_read();
            sync_warpgroup();
#pragma unroll
            for (int box = 0; box < OUT_BOXES; ++box)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int i = 0; i < PIXELS; ++i) {
                        const int pixel = (2 * warp + i % 2) * BLOCK_COLS * BLOCKS + i / 2 * BLOCK_COLS + lane % 8;
                        stmatrix_x4(boxes + box * OUT_BYTES + pixel * ROW +
                                        Boxes<Widths>::place(4 * g + lane / 8, lane),
                                    x[box][g][i]);
                    }
            fence_async_proxy();
            sync_warpgroup();
            if (storing_thread) {
#pragma unroll
                for (int box = 0; box < OUT_BOXES; ++box) {
                    const int channel = tile.channel_tile * COLUMNS + (first + box) * BOX_CHANNELS;
                    // With Up, a tile column makes two output columns, which the tensor map treats as adjacent
                    // channels.
                    const int side = p.phases == 4 ? (tile.phase & 1) * p.cout : 0;
                    if (channel < p.cout && corner.x < width_of(view))
                        tma_store_5d(&p.out_map[view], side + channel, corner.x, tile.phase >> 1, corner.y, frame.out,
                                     boxes + box * OUT_BYTES);
                }
                tma_store_commit();
            }
            if constexpr (Shared::STATISTICS) {
                if (!moments) continue;
                BoxSums<BLOCK_COLS * BLOCKS> sums[OUT_BOXES];
#pragma unroll
                for (int box = 0; box < OUT_BOXES; ++box)
                    sums[box].add(boxes + box * OUT_BYTES, warp, lane, p.height - corner.y, width_of(view) - corner.x);
#pragma unroll
                for (int box = 0; box < OUT_BOXES; ++box)
                    sums[box].store_moments(warp, lane, p.height - corner.y, width_of(view) - corner.x,
                                            moments + (first + box) * K_BLOCK / 4);
            }
        }
    }

    /// The record of this warpgroup's pixels, at the first channel of the tile; null for none.
    __device__ __forceinline__ float2* group_record() const {
        if (!Shared::STATISTICS || !p.records || corner.y >= p.height || corner.x >= p.width) return nullptr;
        return record_at(p, tile, tile.frame, corner.x, corner.y) + tile.channel_tile * COLUMNS / 4;
    }

    /// The record of a frame of a pair, whose pixels both warpgroups have.
    __device__ __forceinline__ void store_pair_record(const FrameParams& frame,
                                                      const float2 (&moments)[CONSUMERS][COLUMNS / 4], int view) const {
        if (tile.y >= p.height || tile.x >= p.width) return;
        const int left = min(width_of(view) - tile.x, GROUP_COLS), right = max(0, left - BLOCK_COLS);
        const float rows = 4 * min(p.height - tile.y, GROUP_ROWS);
        record_at(p, tile, frame.record, tile.x, tile.y)[tile.channel_tile * COLUMNS / 4 + lane] =
            merge_moments(moments[0][lane], rows * (left - right), moments[1][lane], rows * right);
    }
};
