// What comes before and after the sum of a convolution: bias, or sums of another launch; residual, one rounding, store, and partial
// statistics for the next norm.
//
// Accumulators come in the layout that mma.sync and wgmma share: in blocks of 8 columns, lane `4 r + t` of a warp
// holds columns 2 t and 2 t + 1 of pixel r. With 2 bytes an element, a 4 x 4 transposition among the lanes of a pixel
// turns four blocks into 8 neighbouring channels a lane, which is 16 bytes to load or store. With 4 bytes, the four lanes
// of a pixel have 32 bytes side by side as it is.
#pragma once
#include "statistics.cuh"

/// lane t: x[b] = (block b, place t)  ->  lane t: x[i] = (block t, place i). Its own inverse.
__device__ __forceinline__ void transpose4(u32 (&x)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? got : x[i];
        x[i + 1] = odd ? x[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
        x[i] = high ? got : x[i];
        x[i + 2] = high ? x[i + 2] : got;
    }
}

/// A lane's part of four blocks of 8 columns, from `column` on, as it lies in memory. What is loaded beyond `cout` channels,
/// or where not `valid`, is some number or other.
#ifdef VVAE_FP32
struct Memory4 {
    Pair x[4];

    __device__ __forceinline__ void load(const u8* pixel, bool, int column, int cout, int lane) {
        const u8* mine = pixel + 2 * (lane & 3) * ELEMENT;
#pragma unroll
        for (int b = 0; b < 4; ++b) x[b] = load_pair_once(mine + min(column + 8 * b, cout - 8) * ELEMENT);
    }

    __device__ __forceinline__ void store(u8* pixel, bool valid, int column, int cout, int lane) const {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int channel = column + 8 * b + 2 * (lane & 3);
            if (valid && channel < cout) *reinterpret_cast<Pair*>(pixel + channel * ELEMENT) = x[b];
        }
    }

    /// To and from the order of the accumulators: the same here.
    __device__ __forceinline__ void arrange(int) {}
};
#else
struct Memory4 {
    Pair x[4];

    __device__ __forceinline__ void load(const u8* pixel, bool valid, int column, int cout, int lane) {
        const int mine = column + 8 * (lane & 3);
        const uint4 unit = valid && mine < cout ? load_once(pixel + mine * ELEMENT) : make_uint4(0, 0, 0, 0);
        x[0] = unit.x, x[1] = unit.y, x[2] = unit.z, x[3] = unit.w;
    }

    __device__ __forceinline__ void store(u8* pixel, bool valid, int column, int cout, int lane) const {
        const int mine = column + 8 * (lane & 3);
        if (valid && mine < cout) *reinterpret_cast<uint4*>(pixel + mine * ELEMENT) = make_uint4(x[0], x[1], x[2], x[3]);
    }

    /// To and from the order of the accumulators.
    __device__ __forceinline__ void arrange(int lane) { transpose4(x, lane); }
};
#endif

/// The ends of a warp's sums: `PIXELS` pixels a lane, `GROUPS` times four blocks of 8 columns. There is no residual with
/// Window::Up.
template <int PIXELS, int GROUPS>
struct Ends {
    const ConvParams& p;
    const Tile& tile;
    int lane;
    int column;  // first column of the warp

    /// Sums begin with the bias. `place(i)` is the pixel of accumulator row i of this lane in the tile grid,
    /// `acc(i, block, e)` its value.
    template <class Place, class Acc>
    __device__ __forceinline__ void begin(Place place, Acc acc) const {
#pragma unroll
        for (int block = 0; block < 4 * GROUPS; ++block) {
            const float2 v = load_pair(bias_of(p, tile, 0) + column + 8 * block + 2 * (lane & 3));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
        }
        if (p.phases == 4) {
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                const int edge = bias_edge(p, tile, place(i));
                if (edge == 0) continue;
#pragma unroll
                for (int block = 0; block < 4 * GROUPS; ++block) {
                    const float2 v = load_pair(bias_of(p, tile, edge) + column + 8 * block + 2 * (lane & 3));
                    acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
                }
            }
        }
    }

    /// Or they begin with the sums of another launch, if there are any.
    template <class Place, class Acc>
    __device__ __forceinline__ void load_sums(Place place, Acc acc) const {
        const float* before = sums_before(p, tile);
        const int mine = column + 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
#pragma unroll
            for (int block = 0; block < 4 * GROUPS; ++block) acc(i, block, 0) = acc(i, block, 1) = 0;
        if (!before) return;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int at = sums_at(p, tile, place(i));
            if (at < 0) continue;
#pragma unroll
            for (int block = 0; block < 4 * GROUPS; ++block) {
                if (8 * block >= p.cout - mine) continue;
                const float2 v = load_pair(before + (at + mine) + 8 * block);
                acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
            }
        }
    }

    /// Leaves the sums for another launch, if that is what they are for.
    template <class Place, class Acc>
    __device__ __forceinline__ bool leave_sums(Place place, Acc acc) const {
        float* after = sums_after(p, tile);
        if (!after) return false;
        const int mine = column + 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int at = sums_at(p, tile, place(i));
            if (at < 0) continue;
#pragma unroll
            for (int block = 0; block < 4 * GROUPS; ++block)
                if (8 * block < p.cout - mine) store_pair(after + (at + mine) + 8 * block, acc(i, block, 0), acc(i, block, 1));
        }
        return true;
    }

    /// Where sums may be left they are those of products alone, and the bias comes after them.
    template <class Acc>
    __device__ __forceinline__ void add_bias(Acc acc) const {
#pragma unroll
        for (int block = 0; block < 4 * GROUPS; ++block) {
            const float2 v = load_pair(bias_of(p, tile, 0) + column + 8 * block + 2 * (lane & 3));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) += v.x, acc(i, block, 1) += v.y;
        }
    }

    /// Rounds, stores, and gathers statistics of what was stored.
    template <class Place, class Acc>
    __device__ __forceinline__ void store(Place place, Acc acc, WarpSums<8 * GROUPS>* sums) const {
        const Frame& frame = p.frame[tile.frame];
        const bool up = p.phases == 4;
        const int r = up ? tile.phase >> 1 : 0, s = up ? tile.phase & 1 : 0;
        // The tile's first pixel needs 64 bits; its other pixels are less than 2^31 bytes away.
        const int scale = up ? 2 : 1, width = scale * p.width, pixel = p.cout * ELEMENT;
        const i64 corner = (static_cast<i64>(scale * tile.y + r) * width + scale * tile.x + s) * pixel;
        u8* out = p.out + frame.out * p.out_slot_bytes + corner;

        int offset[PIXELS];  // in bytes; negative outside the image
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int2 at = place(i);
            const bool valid = at.y < p.height && at.x < p.width;
            offset[i] = valid ? ((at.y - tile.y) * width + at.x - tile.x) * scale * pixel : -1;
        }
        if (frame.residual >= 0) {
            const u8* residual = p.residual + frame.residual * p.residual_slot_bytes + corner;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) add_residual(residual, offset, g, acc);
        }

        u32 valid = 0;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) valid |= (offset[i] >= 0) << i;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            Pair x[PIXELS][4];
#pragma unroll
            for (int i = 0; i < PIXELS; ++i)
#pragma unroll
                for (int b = 0; b < 4; ++b) x[i][b] = pack2(acc(i, 4 * g + b, 0), acc(i, 4 * g + b, 1));
            if (sums) gather(x, valid, lane, 8 * g, *sums);
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                Memory4 memory = {x[i][0], x[i][1], x[i][2], x[i][3]};
                memory.arrange(lane);
                memory.store(out + offset[i], offset[i] >= 0, column + 32 * g, p.cout, lane);
            }
        }
    }

private:
    template <class Acc>
    __device__ __forceinline__ void add_residual(const u8* residual, const int (&offset)[PIXELS], int g, Acc acc) const {
        // As many loads in flight as there are registers for.
        constexpr int LOADS = ELEMENT == 4 ? PIXELS / 4 : PIXELS;
        Memory4 added[LOADS];
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            if (i % LOADS == 0) {
#pragma unroll
                for (int j = 0; j < LOADS; ++j)
                    added[j].load(residual + max(offset[i + j], 0), offset[i + j] >= 0, column + 32 * g, p.cout, lane);
            }
            added[i % LOADS].arrange(lane);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float2 v = unpack2(added[i % LOADS].x[b]);
                acc(i, 4 * g + b, 0) += v.x;
                acc(i, 4 * g + b, 1) += v.y;
            }
        }
    }
};
