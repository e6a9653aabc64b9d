// Statistics of a staged box, by matrix products: 8 rows of 8 or 16 pixels by 64 channels in shared memory, in the
// 128-byte swizzle.
#pragma once
#include "ampere.cuh"
#include "statistics.cuh"

/// Sums over the pixels of a box. Warp w of a warpgroup has channels 16w to 16w+15. `COLS`: pixels in a row of the box.
///
/// With channels as rows and pixels as columns, a matrix times ones has the sums, and a matrix times its transpose has
/// the squares on its diagonal. A pivot is subtracted first, so that little cancels. It is one of the quad's values.
/// Differences are halved: so they stay in the range of f16.
template <int COLS>
struct BoxSums {
    static constexpr int PRODUCT_PIXELS = 16, PRODUCTS = RECORD_ROWS * COLS / PRODUCT_PIXELS;

    Pair shift[2];  // minus half of the pivot, for each block of 8 channels
    float sums[4] = {}, lower[4] = {}, upper[4] = {};

    /// The first `rows` x `cols` pixels of the box.
    __device__ __forceinline__ void add(u32 box, int warp, int lane, int rows, int cols) {
        // A lane names one of 8 pixels of one of four 8 x 8 matrices.
        const u32 pixels =
            box + (lane / 16 * 8 + lane % 8) * ROW_BYTES + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * UNIT_BYTES;
        const auto inside = [&](int col) { return (col < cols ? 0xffffu : 0u) | (col + 1 < cols ? 0xffff0000u : 0u); };
        const int col = lane % 4 * 2;
        const u32 inside_cols[2] = {inside(col), inside(COLS == 16 ? col + 8 : col)};
        u32 x[PRODUCTS][4];  // [product][pixels][channels], 8 of each
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) ldmatrix_x4_trans(x[i], pixels + i * PRODUCT_PIXELS * ROW_BYTES);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const u32 first = __shfl_sync(~0u, x[0][b], lane & 16);
            shift[b] = negate2(multiply2(__byte_perm(first, 0, 0x1010), HALVES));
        }
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int row = COLS == 16 ? i : 2 * i + j / 2;
                x[i][j] = add_product2(shift[j % 2], x[i][j], HALVES) & (row < rows ? inside_cols[j / 2] : 0);
            }
            mma(sums, x[i], ONES, ONES);
            mma(lower, x[i], x[i][0], x[i][2]);
            mma(upper, x[i], x[i][1], x[i][3]);
        }
    }

    /// Writes mean and M2 of each quad of the box. `rows` and `cols` as in `add`.
    __device__ __forceinline__ void store_moments(int warp, int lane, int rows, int cols, float2* moments) const {
        // A lane has row g and columns 2t and 2t+1 of each result. So those with g / 2 = t have both diagonals. Half of
        // the lanes take squares, half take sums; half of these take the lower block, half the upper.
        const int g = lane / 4, t = lane % 4;
        const bool takes_upper = (t ^ (g >> 1)) & 1, takes_squares = t >> 1 == g >> 2;
        const float lower_square = g & 1 ? lower[1] : lower[0], upper_square = g & 1 ? upper[3] : upper[2];
        const float other_square = __shfl_xor_sync(~0u, upper_square, 1);
        float total = takes_squares ? (takes_upper ? other_square : lower_square) : (takes_upper ? sums[2] : sums[0]);
        total += __shfl_xor_sync(~0u, total, 4);
        total += __shfl_xor_sync(~0u, total, 4 * 2 + 1);
        const float sum = __shfl_xor_sync(~0u, total, 2);
        if (!takes_squares || (g & 3)) return;
        const float n = 4 * max(0, min(rows, RECORD_ROWS)) * max(0, min(cols, COLS));
        const float offset = n > 0.0f ? __fdividef(sum, n) : 0.0f;
        moments[4 * warp + 2 * takes_upper + (g >> 2)] = make_float2(
            2.0f * (offset - unpack2(takes_upper ? shift[1] : shift[0]).x), 4.0f * fmaxf(total - sum * offset, 0.0f));
    }
};

/// Merges the moments of `n` and `m` values.
__device__ __forceinline__ float2 merge_moments(float2 x, float n, float2 y, float m) {
    if (m == 0.0f) return x;
    const float share = __fdividef(m, n + m), difference = y.x - x.x;
    return make_float2(fmaf(difference, share, x.x), x.y + y.y + difference * difference * n * share);
}
