// Statistics of what a convolution stores, for the norm that comes next: mean and sum of squared differences of every 4
// neighbouring channels over records of 8 x 16 pixels. Every order of summation is fixed by the frame's shape.
#pragma once
#include "conv.cuh"

/// Adds up each of 8 values over the 8 pixels of a warp; lane `4 r + t` is left with value r.
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

/// Sums of a warp about a pivot (a value of the group, so that little cancels), for each 4 neighbouring channels.
template <int QUADS>
struct WarpSums {
    float pivot[QUADS], sum[QUADS], squares[QUADS];
};

/// Sums of each block's pairs over a lane's pixels, and of their squares.
template <int PIXELS, class Pivot>
__device__ __forceinline__ void add_moments(const Pair (&x)[PIXELS][4], u32 valid, Pivot pivot, float (&moment)[8]) {
#pragma unroll
    for (int i = 0; i < PIXELS; ++i)
        if (valid >> i & 1) {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float2 v = unpack2(x[i][b]);
                const float u = v.x - pivot(b), w = v.y - pivot(b);
                moment[b] += u + w;
                moment[4 + b] = fmaf(u, u, fmaf(w, w, moment[4 + b]));
            }
        }
}

/// Adds what a warp stores to its sums: `x[i][b]` is a pair of neighbouring channels of block b of 8 channels and of pixel
/// i of this lane, as mma fragments have them; `valid` has bit i set when pixel i is inside the image. Pixel 0 of lane 0
/// is inside whenever any pixel of the warp is.
template <int PIXELS, int QUADS>
__device__ __forceinline__ void gather(const Pair (&x)[PIXELS][4], u32 valid, int lane, int first_quad, WarpSums<QUADS>& sums) {
    float pivot[4], moment[8] = {};
#pragma unroll
    for (int b = 0; b < 4; ++b) pivot[b] = __shfl_sync(~0u, unpack2(x[0][b]).x, lane & 2);
    add_moments(x, valid, [&](int b) { return pivot[b]; }, moment);
    float total = reduce8(moment, lane);
    total += __shfl_xor_sync(~0u, total, 1);
    const int t = lane & 3, quad = first_quad + (lane >> 2 & 3) * 2 + (t >> 1);
    if ((t & 1) == 0) (lane < 16 ? sums.sum : sums.squares)[quad] = total;
    if (lane < 4 && (t & 1) == 0) {
#pragma unroll
        for (int b = 0; b < 4; ++b) sums.pivot[first_quad + 2 * b + (t >> 1)] = pivot[b];
    }
}

/// The same numbers where a lane's four pairs are whole units of neighbouring channels: then blocks 2 h and 2 h + 1 are the 4
/// channels whose sums they are added up to.
template <int PIXELS, int QUADS>
__device__ __forceinline__ void gather_units(const Pair (&x)[PIXELS][4], u32 valid, int lane, int first_quad,
                                             WarpSums<QUADS>& sums) {
    const int t = lane & 3;
    const auto quad = [&](int h) { return first_quad + (UNIT == 8 ? 2 * t + h : 4 * h + t); };
    float pivot[2], moment[8] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) pivot[h] = __shfl_sync(~0u, unpack2(x[0][2 * h]).x, t);
    add_moments(x, valid, [&](int b) { return pivot[b / 2]; }, moment);
    float total = reduce8(moment, lane);
    total += __shfl_xor_sync(~0u, total, 4);
    if ((lane & 4) == 0) (lane < 16 ? sums.sum : sums.squares)[quad(lane >> 3 & 1)] = total;
    if (lane < 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) sums.pivot[quad(h)] = pivot[h];
    }
}

/// Merges the sums of `WARPS` warps that lie below each other, `ROWS` rows each, and writes the record at (x, y) of the
/// tile grid.
template <int WARPS, int ROWS, int QUADS>
__device__ __forceinline__ void store_record(const ConvParams& p, const Tile& tile, const WarpSums<QUADS>* sums, int quad, int x,
                                             int y, int first_column) {
    if (y >= p.height || x >= p.width) return;
    const int record_rows = (p.height + RECORD_ROWS - 1) / RECORD_ROWS, record_cols = (p.width + RECORD_COLS - 1) / RECORD_COLS;
    const float cols = min(p.width - x, RECORD_COLS) * 4;
    float n[WARPS], mean[WARPS], m2[WARPS], total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        n[w] = max(0, min(p.height - (y + w * ROWS), ROWS)) * cols;
        const float sum = sums[w].sum[quad], share = n[w] > 0.0f ? __fdividef(sum, n[w]) : 0.0f;
        mean[w] = n[w] > 0.0f ? sums[w].pivot[quad] + share : 0.0f;
        m2[w] = n[w] > 0.0f ? fmaxf(sums[w].squares[quad] - sum * share, 0.0f) : 0.0f;
        total += n[w] * mean[w];
    }
    float2 all = make_float2(__fdividef(total, min(p.height - y, RECORD_ROWS) * cols), 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) all.y += m2[w] + n[w] * (mean[w] - all.x) * (mean[w] - all.x);
    const i64 record = (static_cast<i64>(tile.frame * p.phases + tile.phase) * record_rows + y / RECORD_ROWS) * record_cols +
                       x / RECORD_COLS;
    p.partials[record * (p.column_tiles * COLUMNS / 4) + first_column / 4 + quad] = all;
}
