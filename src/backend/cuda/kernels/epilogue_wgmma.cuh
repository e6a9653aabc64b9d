// Epilogue of conv_wgmma, for a consumer warpgroup's 8 x 16 pixels by 128 channels: bias or partial sums, residual, one
// rounding, TMA store, statistics. Kept short, because the tensor cores may idle meanwhile.
#pragma once
#include "epilogue.cuh"
#include "mainloop_wgmma.cuh"

struct EpilogueWgmma {
    const ConvParams& p;
    Shared& shared;
    const Tile& tile;
    int group, warp, lane;
    int2 corner;

    /// Pixel i of this lane. A warpgroup computes two blocks of 8 x 8 pixels; a warp has two rows of 8 in each.
    __device__ __forceinline__ int2 pixel_of(int i) const {
        return make_int2(corner.x + 8 * (i / 2) + lane / 4, corner.y + 2 * warp + i % 2);
    }

    static __device__ __forceinline__ float& value(float (&acc)[2][64], int i, int block, int e) {
        return acc[i / 2][4 * block + 2 * (i % 2) + e];
    }

    /// Named barrier of this warpgroup. Barrier 0 is __syncthreads.
    __device__ __forceinline__ void sync_warpgroup() const { named_barrier(1 + group, 128); }

    /// Starts the sums from partial sums of another launch, or from zero.
    __device__ __forceinline__ void load_partial(float (&acc)[2][64]) const {
        const float* partial = tile_partial_in(p, tile);
        const int channel = tile.channel_tile * TILE_CHANNELS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int offset = partial ? partial_offset(p, tile, pixel_of(i)) : -1;
#pragma unroll
            for (int block = 0; block < TILE_CHANNELS / 8; ++block) {
                const bool inside = offset >= 0 && channel + 8 * block < p.cout;
                const float2 v =
                    inside ? load_pair_readonly(partial + (offset + channel + 8 * block)) : make_float2(0, 0);
                value(acc, i, block, 0) = v.x, value(acc, i, block, 1) = v.y;
            }
        }
    }

    /// Stores the sums as partial sums for another launch. Returns false if this launch finishes the tile.
    __device__ __forceinline__ bool store_partial(float (&acc)[2][64]) const {
        float* partial = tile_partial_out(p, tile);
        if (!partial) return false;
        const int channel = tile.channel_tile * TILE_CHANNELS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int offset = partial_offset(p, tile, pixel_of(i));
#pragma unroll
            for (int block = 0; block < TILE_CHANNELS / 8; ++block)
                if (offset >= 0 && channel + 8 * block < p.cout)
                    store_pair(partial + (offset + channel + 8 * block), value(acc, i, block, 0),
                               value(acc, i, block, 1));
        }
        return true;
    }

    /// Starts the copy of the bias, to overlap with the mainloop. All threads have read the previous tile's bias.
    __device__ __forceinline__ void prefetch_bias() const {
        const int edges = p.phases == 4 ? 4 : 1, channel = warp * 32 + lane;
        for (int edge = 0; edge < edges; ++edge)
            cp_async_4(smem_address(&shared.bias[group][edge][channel]),
                       bias_of(p, tile, edge) + tile.channel_tile * TILE_CHANNELS + channel);
    }

    __device__ __forceinline__ void add_bias(float (&acc)[2][64]) const {
        const int edges = p.phases == 4 ? 4 : 1;
        const float (*bias)[TILE_CHANNELS] = shared.bias[group];
        cp_async_wait_all();
        sync_warpgroup();
#pragma unroll
        for (int block = 0; block < TILE_CHANNELS / 8; ++block) {
            const float2 v = *reinterpret_cast<const float2*>(&bias[0][8 * block + lane % 4 * 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) value(acc, i, block, 0) += v.x, value(acc, i, block, 1) += v.y;
        }
        if (edges == 1) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int edge = bias_edge(p, tile, pixel_of(i));
            if (edge == 0) continue;
#pragma unroll
            for (int block = 0; block < TILE_CHANNELS / 8; ++block)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int channel = 8 * block + lane % 4 * 2 + e;
                    value(acc, i, block, e) += bias[edge][channel] - bias[0][channel];
                }
        }
    }

    /// Waits for a residual box and releases it.
    __device__ __forceinline__ void skip_residual_box(PipelineState<WEIGHT_STAGES>& pipe) const {
        mbarrier_wait(smem_address(&shared.weights_full[pipe.stage]), pipe.parity);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&shared.weights_empty[pipe.stage]));
        pipe.advance();
    }

    /// Adds the two boxes of this warpgroup, 64 channels each.
    __device__ __forceinline__ void add_residual(float (&acc)[2][64], PipelineState<WEIGHT_STAGES>& pipe) const {
        // This lane reads 4 bytes of each 16-byte unit of a pixel's swizzled row.
        const u32 lane_offset = (2 * warp * 16 + lane / 4) * ROW_BYTES + lane % 4 * 4;
#pragma unroll
        for (int box = 0; box < 2; ++box) {
            mbarrier_wait(smem_address(&shared.weights_full[pipe.stage]), pipe.parity);
            const u8* residual = shared.weights[pipe.stage] + lane_offset;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int unit = 0; unit < 8; ++unit) {
                    const u32 row = (i % 2 * 16 + i / 2 * 8) * ROW_BYTES;
                    const float2 v =
                        unpack2(*reinterpret_cast<const u32*>(residual + row + ((unit ^ (lane / 4)) << 4)));
                    value(acc, i, box * 8 + unit, 0) += v.x;
                    value(acc, i, box * 8 + unit, 1) += v.y;
                }
            skip_residual_box(pipe);
        }
    }

    /// Rounds and stores 64 channels at a time, and reduces the moments of the rounded values unless `moments` is null.
    __device__ __forceinline__ void store(float (&acc)[2][64], WarpMoments<TILE_CHANNELS / 4>* moments) const {
        const bool storing_thread = warp == 0 && lane == 0;
        const u32 out = smem_address(shared.out[group]);
        u32 valid = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) valid |= (pixel_of(i).y < p.height && pixel_of(i).x < p.width) << i;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 x[2][4][4];  // [32 channels][pixel][8 channels]
#pragma unroll
            for (int g = 0; g < 2; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int b = 0; b < 4; ++b) {
                        const int block = 8 * half + 4 * g + b;
                        x[g][i][b] = pack2(value(acc, i, block, 0), value(acc, i, block, 1));
                    }
            if (storing_thread) tma_store_wait_read();
            sync_warpgroup();
#pragma unroll
            for (int g = 0; g < 2; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int pixel = (2 * warp + i % 2) * 16 + i / 2 * 8 + lane % 8;
                    stmatrix_x4(out + pixel * ROW_BYTES + ((4 * g + lane / 8) ^ (lane % 8)) * 16, x[g][i]);
                }
            fence_async_proxy();
            sync_warpgroup();
            const int channel = tile.channel_tile * TILE_CHANNELS + half * K_BLOCK;
            if (storing_thread && channel < p.cout) {
                // With Up, a tile column makes two output columns, which the tensor map treats as adjacent channels.
                const int side = p.phases == 4 ? (tile.phase & 1) * p.cout : 0;
                tma_store_5d(&p.out_map, side + channel, corner.x, tile.phase >> 1, corner.y, p.frame[tile.frame].out,
                             out);
            }
            if (moments) {
#pragma unroll
                for (int g = 0; g < 2; ++g) reduce_moments(x[g], valid, lane, 16 * half + 8 * g, moments[warp]);
            }
        }
        if (moments) {
            sync_warpgroup();
            if (warp == 0)
                store_record<4, 2>(p, tile, moments, lane, corner.x, corner.y, tile.channel_tile * TILE_CHANNELS);
        }
    }
};
