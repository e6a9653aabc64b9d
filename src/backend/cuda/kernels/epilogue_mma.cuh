// Epilogue of the convolutions by mma.sync: bias or partial sums, residual, one rounding, store, statistics.
//
// In blocks of 8 columns, lane 4r+t of a warp holds columns 2t and 2t+1 of pixel r. Weights are packed so that the
// columns of four blocks that a lane holds are adjacent output channels: one unit of 16 bytes, two with 4-byte
// elements.
#pragma once
#include "epilogue.cuh"

constexpr int BLOCKS = 4;                         // of a warp
constexpr int UNIT_BLOCKS = UNIT_CHANNELS / 2;    // blocks that share a unit
constexpr int LANE_UNITS = BLOCKS / UNIT_BLOCKS;  // of a pixel

/// First of the two output channels of a lane in a block, of 32 of the warp.
__device__ __forceinline__ int block_channel(int block, int lane) {
    return block / UNIT_BLOCKS * (4 * UNIT_CHANNELS) + (lane & 3) * UNIT_CHANNELS + block % UNIT_BLOCKS * 2;
}

#ifdef VVAE_FP32
__device__ __forceinline__ uint4 unit_of(const Pair* x) {
    return make_uint4(__float_as_uint(x[0].x), __float_as_uint(x[0].y), __float_as_uint(x[1].x),
                      __float_as_uint(x[1].y));
}
__device__ __forceinline__ Pair pair_of(uint4 unit, int i) {
    return i ? make_float2(__uint_as_float(unit.z), __uint_as_float(unit.w))
             : make_float2(__uint_as_float(unit.x), __uint_as_float(unit.y));
}
#else
__device__ __forceinline__ uint4 unit_of(const Pair* x) { return make_uint4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ Pair pair_of(uint4 unit, int i) {
    return i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
}
#endif

/// Volatile, so that no copies of accumulators are live at the same time.
__device__ __forceinline__ void add_in_place(float& x, float y) {
    asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
}

/// For a warp whose lanes hold `PIXELS` pixels by four blocks of 8 channels. Pixels 2k and 2k + 1 are in row k of the
/// warp, 8 columns apart. `acc(i, block, e)` are the accumulators. There is no residual with Up.
template <int PIXELS, class Widths = Wide>
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
        for (int block = 0; block < BLOCKS; ++block) {
            const float2 v = load_pair_readonly(bias_of<Widths>(p, frame, tile, 0) + channel + block_channel(block, lane));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
        }
        if (p.phases == 4) load_edge_bias(acc);
    }

    /// The same for pixels with another bias, at the edges of an image with Up.
    template <class Acc>
    __device__ __forceinline__ void load_edge_bias(Acc acc) const {
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int edge = bias_edge(p, tile, pixel_of(i));
            if (edge == 0) continue;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const float* bias = bias_of<Widths>(p, frame, tile, edge);
                const float2 v = load_pair_readonly(bias + channel + block_channel(block, lane));
                acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
            }
        }
    }

    /// Starts the sums from partial sums of another launch, or from zero.
    template <class Acc>
    __device__ __forceinline__ void load_partial(Acc acc) const {
        const float* partial = tile_partial_in(p, tile);
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) acc(i, block, 0) = acc(i, block, 1) = 0;
        if (!partial) return;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int offset = partial_offset(p, tile, pixel_of(i));
            if (offset < 0) continue;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int lane_channel = channel + block_channel(block, lane);
                if (lane_channel >= p.cout) continue;
                const float2 v = load_pair_readonly(partial + offset + lane_channel);
                acc(i, block, 0) = v.x, acc(i, block, 1) = v.y;
            }
        }
    }

    /// Stores the sums as partial sums for another launch. Returns false if this launch finishes the tile.
    template <class Acc>
    __device__ __forceinline__ bool store_partial(Acc acc) const {
        float* partial = tile_partial_out(p, tile);
        if (!partial) return false;
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            const int offset = partial_offset(p, tile, pixel_of(i));
            if (offset < 0) continue;
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int lane_channel = channel + block_channel(block, lane);
                if (lane_channel < p.cout)
                    store_pair(partial + offset + lane_channel, acc(i, block, 0), acc(i, block, 1));
            }
        }
        return true;
    }

    /// Partial sums hold products only, so the bias comes last.
    template <class Acc>
    __device__ __forceinline__ void add_bias(Acc acc) const {
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            const float2 v = load_pair_readonly(bias_of<Widths>(p, frame, tile, 0) + channel + block_channel(block, lane));
#pragma unroll
            for (int i = 0; i < PIXELS; ++i) acc(i, block, 0) += v.x, acc(i, block, 1) += v.y;
        }
    }

    /// Adds the residual, rounds, stores, and reduces the moments of the rounded values unless `moments` is null.
    template <class Acc>
    __device__ __forceinline__ void store(Acc acc, WarpMoments<8>* moments) const {
        const bool up = p.phases == 4;
        const int r = up ? tile.phase >> 1 : 0, s = up ? tile.phase & 1 : 0, scale = up ? 2 : 1;
        const i64 pixel = static_cast<i64>(scale * first.y + r) * (scale * p.width) + scale * first.x + s;
        const i64 corner = pixel * p.cout * ELEMENT_BYTES;
        u32 valid = 0;  // bit i: pixel i is inside the image
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) valid |= (pixel_of(i).y < p.height && pixel_of(i).x < p.width) << i;
        if (frame.residual >= 0) {
            const u8* residual = p.residual + frame.residual * p.residual_slot_bytes;
            add_residual(residual + corner, valid, acc);
        }
        u8* const out = p.out + frame.out * p.out_slot_bytes + corner;
        Pair x[PIXELS][BLOCKS];
#pragma unroll
        for (int i = 0; i < PIXELS; ++i)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) x[i][b] = pack2(acc(i, b, 0), acc(i, b, 1));
        if (moments) reduce_moments(x, valid, lane, 0, *moments);
        PixelWalk<u8> at = {out, column_bytes() * scale, row_bytes() * scale * scale};
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            u8* const pixel = at.next(i);
#pragma unroll
            for (int u = 0; u < LANE_UNITS; ++u)
                if (valid >> i & has_unit(u))
                    *reinterpret_cast<uint4*>(pixel + unit_offset(u)) = unit_of(x[i] + u * UNIT_BLOCKS);
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

    /// Bytes of a lane's unit from the start of its pixel, and whether its channels exist.
    __device__ __forceinline__ int unit_offset(int u) const {
        return (channel + block_channel(u * UNIT_BLOCKS, lane)) * ELEMENT_BYTES;
    }
    __device__ __forceinline__ bool has_unit(int u) const {
        return channel + block_channel(u * UNIT_BLOCKS, lane) < p.cout;
    }

    template <class Acc>
    __device__ __forceinline__ void add_residual(const u8* residual, u32 valid, Acc acc) const {
        // Loads in flight: as many as the registers allow.
        constexpr int LOADS = ELEMENT_BYTES == 4 ? PIXELS / 4 : PIXELS;
        uint4 unit[LOADS][LANE_UNITS];
        PixelWalk<const u8> at = {residual, column_bytes(), row_bytes()};
#pragma unroll
        for (int i = 0; i < PIXELS; ++i) {
            if (i % LOADS == 0) {
#pragma unroll
                for (int j = 0; j < LOADS; ++j) {
                    const u8* const pixel = at.next(i + j);
#pragma unroll
                    for (int u = 0; u < LANE_UNITS; ++u) {
                        const bool inside = valid >> (i + j) & has_unit(u);
                        unit[j][u] = inside ? load_once(pixel + unit_offset(u)) : make_uint4(0, 0, 0, 0);
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float2 v = unpack2(pair_of(unit[i % LOADS][b / UNIT_BLOCKS], b % UNIT_BLOCKS));
                add_in_place(acc(i, b, 0), v.x);
                add_in_place(acc(i, b, 1), v.y);
            }
        }
    }
};
