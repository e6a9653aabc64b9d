// What a computing warpgroup does with its sums of 8 x 16 pixels by 128 channels: bias, residual, rounding, store by the
// copy engine, statistics. It is short because the tensor cores may be idle meanwhile.
#pragma once
#include "wgmma_feed.cuh"

struct Finish {
    const ConvParams& p;
    Shared& shared;
    const Tile& tile;
    int group, warp, lane;
    int2 corner;

    /// Row i of this lane's accumulators: two blocks of 8 x 8 pixels, of which a warp has two rows of 8.
    __device__ __forceinline__ int2 place(int i) const {
        return make_int2(corner.x + 8 * (i / 2) + lane / 4, corner.y + 2 * warp + i % 2);
    }

    static __device__ __forceinline__ float& value(float (&acc)[2][64], int i, int block, int e) {
        return acc[i / 2][4 * block + 2 * (i % 2) + e];
    }

    __device__ __forceinline__ void barrier() const { named_barrier(1 + group, 128); }

    /// Begins with the sums of another launch, if there are any.
    __device__ __forceinline__ void load_sums(float (&acc)[2][64]) const {
        const float* before = sums_before(p, tile);
        const int column = tile.column * COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = before ? sums_at(p, tile, place(i)) : -1;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; ++block) {
                const bool there = at >= 0 && column + 8 * block < p.cout;
                const float2 v = there ? load_pair(before + (at + column + 8 * block)) : make_float2(0, 0);
                value(acc, i, block, 0) = v.x, value(acc, i, block, 1) = v.y;
            }
        }
    }

    /// Leaves the sums for another launch, if that is what they are for.
    __device__ __forceinline__ bool leave_sums(float (&acc)[2][64]) const {
        float* after = sums_after(p, tile);
        if (!after) return false;
        const int column = tile.column * COLUMNS + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = sums_at(p, tile, place(i));
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; ++block)
                if (at >= 0 && column + 8 * block < p.cout)
                    store_pair(after + (at + column + 8 * block), value(acc, i, block, 0), value(acc, i, block, 1));
        }
        return true;
    }

    /// On its way while the sum is computed, when nobody waits for it. All threads have read that of the tile before.
    __device__ __forceinline__ void fetch_bias() const {
        const int edges = p.phases == 4 ? 4 : 1, column = warp * 32 + lane;
        for (int edge = 0; edge < edges; ++edge)
            copy4(smem_address(&shared.bias[group][edge][column]), bias_of(p, tile, edge) + tile.column * COLUMNS + column);
    }

    __device__ __forceinline__ void add_bias(float (&acc)[2][64]) const {
        const int edges = p.phases == 4 ? 4 : 1;
        const float(*all)[COLUMNS] = shared.bias[group];
        wait_copies();
        barrier();
#pragma unroll
        for (int block = 0; block < COLUMNS / 8; ++block) {
            const float2 v = *reinterpret_cast<const float2*>(&all[0][8 * block + lane % 4 * 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) value(acc, i, block, 0) += v.x, value(acc, i, block, 1) += v.y;
        }
        if (edges == 1) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int edge = bias_edge(p, tile, place(i));
            if (edge == 0) continue;
#pragma unroll
            for (int block = 0; block < COLUMNS / 8; ++block)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = 8 * block + lane % 4 * 2 + e;
                    value(acc, i, block, e) += all[edge][column] - all[0][column];
                }
        }
    }

    __device__ __forceinline__ void pass_box(Ring<WEIGHT_STAGES>& ring) const {
        barrier_wait(smem_address(&shared.weights_full[ring.stage]), ring.parity);
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&shared.weights_empty[ring.stage]));
        ring.next();
    }

    /// The two boxes of this warpgroup's residual, 64 channels each.
    __device__ __forceinline__ void add_residual(float (&acc)[2][64], Ring<WEIGHT_STAGES>& ring) const {
        // Of a pixel's 128-byte row this lane wants 4 bytes of each 16-byte unit, as the swizzle has them.
        const u32 mine = (2 * warp * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
        for (int box = 0; box < 2; ++box) {
            barrier_wait(smem_address(&shared.weights_full[ring.stage]), ring.parity);
            const u8* at = shared.weights[ring.stage] + mine;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int unit = 0; unit < 8; ++unit) {
                    const u32 row = (i % 2 * 16 + i / 2 * 8) * 128;
                    const float2 v = unpack2(*reinterpret_cast<const u32*>(at + row + ((unit ^ (lane / 4)) << 4)));
                    value(acc, i, box * 8 + unit, 0) += v.x;
                    value(acc, i, box * 8 + unit, 1) += v.y;
                }
            pass_box(ring);
        }
    }

    /// Rounds and stores 64 channels at a time, and adds what was stored to `sums`.
    __device__ __forceinline__ void store(float (&acc)[2][64], WarpSums<32>* sums) const {
        const bool first = warp == 0 && lane == 0;
        const u32 out = smem_address(shared.out[group]);
        u32 valid = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) valid |= (place(i).y < p.height && place(i).x < p.width) << i;
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
            if (first) wait_boxes_read();
            barrier();
#pragma unroll
            for (int g = 0; g < 2; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int pixel = (2 * warp + i % 2) * 16 + i / 2 * 8 + lane % 8;
                    store_matrices(out + pixel * 128 + ((4 * g + lane / 8) ^ (lane % 8)) * 16, x[g][i]);
                }
            fence_async_proxy();
            barrier();
            const int channel = tile.column * COLUMNS + half * CHUNK;
            if (first && channel < p.cout) {
                // With Up, the two columns of pixels that a column of the tile grid makes count as channels side by side.
                const int side = p.phases == 4 ? (tile.phase & 1) * p.cout : 0;
                store_box(&p.out_map, side + channel, corner.x, tile.phase >> 1, corner.y, p.frame[tile.frame].out, out);
            }
            if (sums) {
#pragma unroll
                for (int g = 0; g < 2; ++g) gather(x[g], valid, lane, 16 * half + 8 * g, sums[warp]);
            }
        }
        if (sums) {
            barrier();
            if (warp == 0) store_record<4, 2>(p, tile, sums, lane, corner.x, corner.y, tile.column * COLUMNS);
        }
    }
};
