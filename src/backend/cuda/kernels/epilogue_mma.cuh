// Epilogue of conv_mma: bias or partial sums, residual, one rounding, store, statistics.
//
// Accumulators have the fragment layout of mma.sync: in blocks of 8 channels, lane 4r+t of a warp holds channels 2t and
// 2t+1 of pixel r. With 2-byte elements, a 4 x 4 transposition among the lanes of a pixel turns four blocks into 8
// adjacent channels per lane, one 16-byte store. With 4-byte elements, the four lanes of a pixel cover 32 adjacent
// bytes already.
#pragma once
#include "epilogue.cuh"

/// lane t: x[b] = (block b, position t)  ->  lane t: x[i] = (block t, position i). Its own inverse.
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

/// A lane's share of four blocks of 8 channels, in memory order. Loads beyond `cout`, or of pixels that are not
/// `valid`, give arbitrary numbers.
#ifdef VVAE_FP32
struct MemoryFragment {
    Pair x[4];

    __device__ __forceinline__ void load(const u8* pixel, bool, int channel, int cout, int lane) {
        const u8* from = pixel + 2 * (lane & 3) * ELEMENT_BYTES;
#pragma unroll
        for (int b = 0; b < 4; ++b) x[b] = load_pair_once(from + min(channel + 8 * b, cout - 8) * ELEMENT_BYTES);
    }

    __device__ __forceinline__ void store(u8* pixel, bool valid, int channel, int cout, int lane) const {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int lane_channel = channel + 8 * b + 2 * (lane & 3);
            if (valid && lane_channel < cout) *reinterpret_cast<Pair*>(pixel + lane_channel * ELEMENT_BYTES) = x[b];
        }
    }

    /// Between memory order and accumulator order: the same here.
    __device__ __forceinline__ void transpose(int) {}
};
#else
struct MemoryFragment {
    Pair x[4];

    __device__ __forceinline__ void load(const u8* pixel, bool valid, int channel, int cout, int lane) {
        const int lane_channel = channel + 8 * (lane & 3);
        const bool inside = valid && lane_channel < cout;
        const uint4 unit = inside ? load_once(pixel + lane_channel * ELEMENT_BYTES) : make_uint4(0, 0, 0, 0);
        x[0] = unit.x, x[1] = unit.y, x[2] = unit.z, x[3] = unit.w;
    }

    __device__ __forceinline__ void store(u8* pixel, bool valid, int channel, int cout, int lane) const {
        const int lane_channel = channel + 8 * (lane & 3);
        if (valid && lane_channel < cout)
            *reinterpret_cast<uint4*>(pixel + lane_channel * ELEMENT_BYTES) = make_uint4(x[0], x[1], x[2], x[3]);
    }

    /// Between memory order and accumulator order.
    __device__ __forceinline__ void transpose(int lane) { transpose4(x, lane); }
};
#endif

/// Volatile, so that no copies of accumulators are live at the same time.
__device__ __forceinline__ void add_in_place(float& x, float y) {
    asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
}

/// For a warp whose lanes hold `PIXELS` pixels by `GROUPS` groups of four blocks of 8 channels. Pixels 2k and 2k + 1
/// are in row k of the warp, 8 columns apart. `acc(i, block, e)` are the accumulators. There is no residual with Up.
template <int PIXELS, int GROUPS>
struct EpilogueMma {
    const ConvParams& p;
    const Tile& tile;
    const FrameParams& frame;
    int lane;
    int2 first;   // pixel 0 of the lane, in the tile grid
    int channel;  // first channel of the warp

    __device__ __forceinline__ int2 pixel_of(int i) const { return make_int2(first.x + 8 * (i % 2), first.y + i / 2); }

    /// Starts the sums from the bias.
    template <class Acc>
    __device__ __forceinline__ void load_bias(Acc acc) const {
#pragma unroll
        for (int block = 0; block < 4 * GROUPS; ++block) {
            const float2 v = load_pair_readonly(bias_of(p, frame, tile, 0) + channel + 8 * block + 2 * (lane & 3));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
        }
        if (p.phases == 4) {
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                const int edge = bias_edge(p, tile, pixel_of(i));
                if (edge == 0) continue;
#pragma unroll
                for (int block = 0; block < 4 * GROUPS; ++block) {
                    const float* bias = bias_of(p, frame, tile, edge);
                    const float2 v = load_pair_readonly(bias + channel + 8 * block + 2 * (lane & 3));
                    acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
                }
            }
        }
    }

    /// Starts the sums from partial sums of another launch, or from zero.
    template <class Acc>
    __device__ __forceinline__ void load_partial(Acc acc) const {
        const float* partial = tile_partial_in(p, tile);
        const int lane_channel = channel + 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
#pragma unroll
            for (int block = 0; block < 4 * GROUPS; ++block) acc(i, block, 0) = acc(i, block, 1) = 0;
        if (!partial) return;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int offset = partial_offset(p, tile, pixel_of(i));
            if (offset < 0) continue;
#pragma unroll
            for (int block = 0; block < 4 * GROUPS; ++block) {
                if (8 * block >= p.cout - lane_channel) continue;
                const float2 v = load_pair_readonly(partial + (offset + lane_channel) + 8 * block);
                acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
            }
        }
    }

    /// Stores the sums as partial sums for another launch. Returns false if this launch finishes the tile.
    template <class Acc>
    __device__ __forceinline__ bool store_partial(Acc acc) const {
        float* partial = tile_partial_out(p, tile);
        if (!partial) return false;
        const int lane_channel = channel + 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int offset = partial_offset(p, tile, pixel_of(i));
            if (offset < 0) continue;
#pragma unroll
            for (int block = 0; block < 4 * GROUPS; ++block)
                if (8 * block < p.cout - lane_channel)
                    store_pair(partial + (offset + lane_channel) + 8 * block, acc(i, block, 0), acc(i, block, 1));
        }
        return true;
    }

    /// Partial sums hold products only, so the bias comes last.
    template <class Acc>
    __device__ __forceinline__ void add_bias(Acc acc) const {
#pragma unroll
        for (int block = 0; block < 4 * GROUPS; ++block) {
            const float2 v = load_pair_readonly(bias_of(p, frame, tile, 0) + channel + 8 * block + 2 * (lane & 3));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) += v.x, acc(i, block, 1) += v.y;
        }
    }

    /// Adds the residual, rounds, stores, and reduces the moments of the rounded values unless `moments` is null.
    template <class Acc>
    __device__ __forceinline__ void store(Acc acc, WarpMoments<8 * GROUPS>* moments) const {
        const bool up = p.phases == 4;
        const int r = up ? tile.phase >> 1 : 0, s = up ? tile.phase & 1 : 0, scale = up ? 2 : 1;
        const i64 pixel = static_cast<i64>(scale * first.y + r) * (scale * p.width) + scale * first.x + s;
        const i64 corner = pixel * p.cout * ELEMENT_BYTES;
        u32 valid = 0;  // bit i: pixel i is inside the image
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) valid |= (pixel_of(i).y < p.height && pixel_of(i).x < p.width) << i;
        if (frame.residual >= 0) {
            const u8* residual = p.residual + frame.residual * p.residual_slot_bytes;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) add_residual(residual + corner, valid, g, acc);
        }
        u8* const out = p.out + frame.out * p.out_slot_bytes + corner;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            Pair x[PIXELS][4];
#pragma unroll
            for (int i = 0; i < PIXELS; ++i)
#pragma unroll
                for (int b = 0; b < 4; ++b) x[i][b] = pack2(acc(i, 4 * g + b, 0), acc(i, 4 * g + b, 1));
            if (moments) reduce_moments(x, valid, lane, 8 * g, *moments);
            PixelWalk<u8> at = {out, column_bytes() * scale, row_bytes() * scale * scale};
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                MemoryFragment fragment = {x[i][0], x[i][1], x[i][2], x[i][3]};
                fragment.transpose(lane);
                fragment.store(at.next(i), valid >> i & 1, channel + 32 * g, p.cout, lane);
            }
        }
    }

private:
    /// The addresses of a lane's pixels, one after the other. The compiler would compute all of them at once and spill
    /// accumulators for them, so the pointer is opaque after each row.
    template <class Byte>
    struct PixelWalk {
        Byte* row;
        int column_bytes, row_bytes;

        __device__ __forceinline__ Byte* next(int i) {
            if (i % 2 == 0) return row;
            Byte* const pixel = row + column_bytes;
            row += row_bytes;
            asm volatile("" : "+l"(row));
            return pixel;
        }
    };

    __device__ __forceinline__ int column_bytes() const { return 8 * p.cout * ELEMENT_BYTES; }
    __device__ __forceinline__ int row_bytes() const { return p.width * p.cout * ELEMENT_BYTES; }

    template <class Acc>
    __device__ __forceinline__ void add_residual(const u8* residual, u32 valid, int g, Acc acc) const {
        // Loads in flight: as many as the registers allow.
        constexpr int LOADS = ELEMENT_BYTES == 4 ? PIXELS / 4 : PIXELS / 2;
        MemoryFragment fragment[LOADS];
        PixelWalk<const u8> at = {residual, column_bytes(), row_bytes()};
        // The tile's first pixel is inside the image, and inside the band that memory backs.
        const u8* const unused =
            residual - (first.y - tile.y) * row_bytes() - (first.x - tile.x) * (column_bytes() / 8);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            if (i % LOADS == 0) {
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    const u8* pixel = at.next(i + j);
                    const bool inside = valid >> (i + j) & 1;
                    fragment[j].load(inside ? pixel : unused, inside, channel + 32 * g, p.cout, lane);
                }
            }
            fragment[i % LOADS].transpose(lane);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float2 v = unpack2(fragment[i % LOADS].x[b]);
                add_in_place(acc(i, 4 * g + b, 0), v.x);
                add_in_place(acc(i, 4 * g + b, 1), v.y);
            }
        }
    }
};
