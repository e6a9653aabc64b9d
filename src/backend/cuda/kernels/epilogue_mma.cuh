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

/// For a warp whose lanes hold `PIXELS` pixels by `GROUPS` groups of four blocks of 8 channels. `pixel_of(i)` is a
/// lane's pixel i in the tile grid, `acc(i, block, e)` its accumulators. There is no residual with Up.
template <int PIXELS, int GROUPS>
struct EpilogueMma {
    const ConvParams& p;
    const Tile& tile;
    int lane;
    int channel;  // first channel of the warp

    /// Starts the sums from the bias.
    template <class PixelOf, class Acc>
    __device__ __forceinline__ void load_bias(PixelOf pixel_of, Acc acc) const {
#pragma unroll
        for (int block = 0; block < 4 * GROUPS; ++block) {
            const float2 v =
                load_pair_readonly(bias_of(p, p.frame[tile.frame], tile, 0) + channel + 8 * block + 2 * (lane & 3));
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
                    const float* bias = bias_of(p, p.frame[tile.frame], tile, edge);
                    const float2 v = load_pair_readonly(bias + channel + 8 * block + 2 * (lane & 3));
                    acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
                }
            }
        }
    }

    /// Starts the sums from partial sums of another launch, or from zero.
    template <class PixelOf, class Acc>
    __device__ __forceinline__ void load_partial(PixelOf pixel_of, Acc acc) const {
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
    template <class PixelOf, class Acc>
    __device__ __forceinline__ bool store_partial(PixelOf pixel_of, Acc acc) const {
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
            const float2 v =
                load_pair_readonly(bias_of(p, p.frame[tile.frame], tile, 0) + channel + 8 * block + 2 * (lane & 3));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) += v.x, acc(i, block, 1) += v.y;
        }
    }

    /// Adds the residual, rounds, stores, and reduces the moments of the rounded values unless `moments` is null.
    template <class PixelOf, class Acc>
    __device__ __forceinline__ void store(PixelOf pixel_of, Acc acc, WarpMoments<8 * GROUPS>* moments) const {
        const FrameParams& frame = p.frame[tile.frame];
        const bool up = p.phases == 4;
        const int r = up ? tile.phase >> 1 : 0, s = up ? tile.phase & 1 : 0;
        // The tile's first pixel needs 64 bits; its other pixels are less than 2^31 bytes away.
        const int scale = up ? 2 : 1, width = scale * p.width, pixel_bytes = p.cout * ELEMENT_BYTES;
        const i64 corner = (static_cast<i64>(scale * tile.y + r) * width + scale * tile.x + s) * pixel_bytes;
        u8* out = p.out + frame.out * p.out_slot_bytes + corner;

        int offset[PIXELS];  // in bytes; negative outside the image
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int2 pixel = pixel_of(i);
            const bool valid = pixel.y < p.height && pixel.x < p.width;
            offset[i] = valid ? ((pixel.y - tile.y) * width + pixel.x - tile.x) * scale * pixel_bytes : -1;
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
            if (moments) reduce_moments(x, valid, lane, 8 * g, *moments);
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) {
                MemoryFragment fragment = {x[i][0], x[i][1], x[i][2], x[i][3]};
                fragment.transpose(lane);
                fragment.store(out + offset[i], offset[i] >= 0, channel + 32 * g, p.cout, lane);
            }
        }
    }

private:
    template <class Acc>
    __device__ __forceinline__ void add_residual(const u8* residual, const int (&offset)[PIXELS], int g,
                                                 Acc acc) const {
        // Loads in flight: as many as the registers allow.
        constexpr int LOADS = ELEMENT_BYTES == 4 ? PIXELS / 4 : PIXELS;
        MemoryFragment fragment[LOADS];
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            if (i % LOADS == 0) {
#pragma unroll
                for (int j = 0; j < LOADS; ++j)
                    fragment[j].load(residual + max(offset[i + j], 0), offset[i + j] >= 0, channel + 32 * g, p.cout,
                                     lane);
            }
            fragment[i % LOADS].transpose(lane);
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float2 v = unpack2(fragment[i % LOADS].x[b]);
                acc(i, 4 * g + b, 0) += v.x;
                acc(i, 4 * g + b, 1) += v.y;
            }
        }
    }
};
