// Statistics of a convolution's output, for the next norm: mean and M2 (sum of squared deviations) of 4 adjacent
// channels, a quad, over records of RECORD_ROWS x RECORD_COLS pixels. The frame's shape alone fixes the order of
// summation.
#pragma once
#include "tile_scheduler.cuh"

/// Sums each of 8 values over the 8 pixels of a warp. Lane 4r+t returns value r.
__device__ __forceinline__ float reduce8(float (&v)[8], int lane) {
#pragma unroll
    for (int width = 4; width >= 1; width /= 2) {
        const bool upper = lane & (4 * width);
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const float got = __shfl_xor_sync(~0u, upper ? v[i] : v[i + width], 4 * width);
            v[i] = (upper ? v[i + width] : v[i]) + got;
        }
    }
    return v[0];
}

/// Moments of a warp's pixels about a pivot, per quad. The pivot is one of the values, so little cancels.
template <int QUADS>
struct WarpMoments {
    float pivot[QUADS], sum[QUADS], squares[QUADS];
};

/// Adds the pairs of each block to `moment[block]`, and their squares to `moment[4 + block]`. Two blocks have a pivot.
template <int PIXELS>
__device__ __forceinline__ void add_moments(const Pair (&x)[PIXELS][4], u32 valid, const float (&pivot)[2],
                                            float (&moment)[8]) {
#pragma unroll
    for (int i = 0; i < PIXELS; ++i)
        if (valid >> i & 1) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float2 v = unpack2(x[i][b]);
                const float u = v.x - pivot[b / 2], w = v.y - pivot[b / 2];
                moment[b] += u + w;
                moment[4 + b] = fmaf(u, u, fmaf(w, w, moment[4 + b]));
            }
        }
}

/// Reduces what a warp stores: `x[i]` is four pairs of its pixel i that this lane has, whole units of adjacent
/// channels. Blocks 2h and 2h+1 are one quad. Bit i of `valid`: pixel i is inside the image. Pixel 0 of lane 0 is
/// inside if any pixel of the warp is.
template <int PIXELS, int QUADS>
__device__ __forceinline__ void reduce_moments(const Pair (&x)[PIXELS][4], u32 valid, int lane, int first_quad,
                                               WarpMoments<QUADS>& moments) {
    const int t = lane & 3;
    const auto quad = [&](int h) { return first_quad + (UNIT_CHANNELS == 8 ? 2 * t + h : 4 * h + t); };
    float pivot[2], moment[8] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) pivot[h] = __shfl_sync(~0u, unpack2(x[0][2 * h]).x, t);
    add_moments(x, valid, pivot, moment);
    float total = reduce8(moment, lane);
    total += __shfl_xor_sync(~0u, total, 4);
    if ((lane & 4) == 0) (lane < 16 ? moments.sum : moments.squares)[quad(lane >> 3 & 1)] = total;
    if (lane < 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) moments.pivot[quad(h)] = pivot[h];
    }
}

/// The record of the pixels from (x, y) of the tile grid on, of the launch's output frame `frame`: a quad each.
__device__ __forceinline__ float2* record_at(const ConvParams& p, const Tile& tile, int frame, int x, int y) {
    const int rows = (p.height + RECORD_ROWS - 1) / RECORD_ROWS, cols = (p.width + RECORD_COLS - 1) / RECORD_COLS;
    const i64 record =
        (static_cast<i64>(frame * p.phases + tile.phase) * rows + y / RECORD_ROWS) * cols + x / RECORD_COLS;
    return p.records + record * (p.channel_tiles * TILE_CHANNELS / 4);
}

/// Merges the moments of `WARPS` warps, stacked vertically with `ROWS` rows each, and writes the record of the launch's
/// output frame `frame` at (x, y) of the tile grid.
template <int WARPS, int ROWS, int QUADS>
__device__ __forceinline__ void store_record(const ConvParams& p, const Tile& tile, int frame,
                                             const WarpMoments<QUADS>* moments, int quad, int x, int y,
                                             int first_channel) {
    if (y >= p.height || x >= p.width) return;
    const float cols = min(p.width - x, RECORD_COLS) * 4;
    float n[WARPS], mean[WARPS], m2[WARPS], total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        n[w] = max(0, min(p.height - (y + w * ROWS), ROWS)) * cols;
        const float sum = moments[w].sum[quad], offset = n[w] > 0.0f ? __fdividef(sum, n[w]) : 0.0f;
        mean[w] = n[w] > 0.0f ? moments[w].pivot[quad] + offset : 0.0f;
        m2[w] = n[w] > 0.0f ? fmaxf(moments[w].squares[quad] - sum * offset, 0.0f) : 0.0f;
        total += n[w] * mean[w];
    }
    float2 merged = make_float2(__fdividef(total, min(p.height - y, RECORD_ROWS) * cols), 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) merged.y += m2[w] + n[w] * (mean[w] - merged.x) * (mean[w] - merged.x);
    record_at(p, tile, frame, x, y)[first_channel / 4 + quad] = merged;
}
