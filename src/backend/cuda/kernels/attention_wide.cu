// Attention with one head of more than 512 channels over all pixels of a frame, with a running softmax.
//
// A block computes one tile of queries. Its twelve warps take 16 keys each for the scores, then up to 96 channels each
// for the output. So keys and values go from L2 straight to the registers of the one warp that multiplies them, and
// shared memory holds queries and probabilities alone.
//
// The order of channels in a score is free, and so is the order of output channels in a product's columns. So a lane
// loads units of adjacent channels.
#include "ampere.cuh"
#include "attention.cuh"

constexpr int MAX_WIDE_CHANNELS = 1152;
constexpr int THREADS = 384;
constexpr int WARPS = THREADS / 32;
constexpr int QUERIES_2B = 32;  // queries of a block: 2-byte elements
constexpr int QUERIES_4B = 16;  // 4-byte elements
constexpr int QUERIES = ELEMENT_BYTES == 4 ? QUERIES_4B : QUERIES_2B;
constexpr int SHARED_BYTES_2B = 89600;
constexpr int SHARED_BYTES_4B = 87808;
constexpr int SHARED_BYTES = ELEMENT_BYTES == 4 ? SHARED_BYTES_4B : SHARED_BYTES_2B;

constexpr int TILES = QUERIES / 16;
constexpr int WARP_KEYS = 16, KEYS = WARPS * WARP_KEYS;  // of a step
constexpr int KEY_BLOCKS = WARP_KEYS / 8;
constexpr int MOST_ROW_BYTES = MAX_WIDE_CHANNELS * ELEMENT_BYTES;
constexpr int GROUP_BYTES = 64, GROUPS = MOST_ROW_BYTES / GROUP_BYTES;  // channels that a pixel's lanes load at once
constexpr int SLICE_BYTES = 64;  // output channels: eight half units, one for each column of a block
constexpr int SLICES = MOST_ROW_BYTES / SLICE_BYTES / WARPS;  // of a warp
constexpr int SLICE_BLOCKS = UNIT_CHANNELS / 2;               // of 8 columns
constexpr int K_STEP = K_STEP_BYTES / ELEMENT_BYTES;          // keys of a product with values
constexpr int PITCH = KEYS + UNIT_CHANNELS;  // of a query's probabilities: an odd number of units
static_assert(SLICES * WARPS * SLICE_BYTES == MOST_ROW_BYTES);

struct Shared {
    uint4 queries[TILES][GROUPS][2][32];  // [16 queries][group][query / 8][lane]
    Element probabilities[QUERIES][PITCH];
    float maximum[WARPS][QUERIES], sum[WARPS][QUERIES];  // of the keys of a warp
};
static_assert(sizeof(Shared) == SHARED_BYTES, "dynamic shared memory of a launch");

/// Where a unit or half a unit of a pixel's queries, keys or values is; null beyond the last pixel and channel.
__device__ __forceinline__ const u8* row_at(const AttentionParams& p, const u8* in, int which, int pixel, int byte) {
    const int row_bytes = p.channels * ELEMENT_BYTES;
    const bool inside = pixel < p.pixels && byte < row_bytes;
    return inside ? in + (static_cast<i64>(pixel) * 3 + which) * row_bytes + byte : nullptr;
}

__device__ __forceinline__ uint4 load_unit(const u8* at) { return at ? load_readonly(at) : make_uint4(0, 0, 0, 0); }

__device__ __forceinline__ uint2 load_half_unit(const u8* at) {
    return at ? __ldg(reinterpret_cast<const uint2*>(at)) : make_uint2(0, 0);
}

__device__ __forceinline__ u32 word_of(uint4 unit, int i) {
    return i == 0 ? unit.x : i == 1 ? unit.y : i == 2 ? unit.z : unit.w;
}

/// The products of a group of channels: a lane's words of a unit are its operands, two for each product.
template <int COUNT>
__device__ __forceinline__ void add_group(float (&s)[TILES][KEY_BLOCKS][4], const uint4 (&q)[TILES][2],
                                          const uint4 (&key)[COUNT]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            const u32 a[4] = {word_of(q[m][0], 2 * half), word_of(q[m][1], 2 * half), word_of(q[m][0], 2 * half + 1),
                              word_of(q[m][1], 2 * half + 1)};
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
                mma_long_sum(s[m][n], a, word_of(key[n], 2 * half), word_of(key[n], 2 * half + 1));
        }
}

struct Attention {
    const AttentionParams& p;
    Shared& shared;
    const u8* in;  // the frame
    int warp, lane, groups;

    __device__ __forceinline__ void load_queries(int first_query) const {
        for (int i = threadIdx.x; i < TILES * groups * 2 * 32; i += THREADS) {
            const int at = i % 32, half = i / 32 % 2, group = i / 64 % groups, m = i / 64 / groups;
            const int query = first_query + 16 * m + 8 * half + at / 4;
            shared.queries[m][group][half][at] =
                load_unit(row_at(p, in, 0, query, group * GROUP_BYTES + at % 4 * UNIT_BYTES));
        }
    }

    /// The scores of this warp's keys. A lane has queries lane / 4 and 8 more of each tile, and two keys of every 8.
    __device__ __forceinline__ void multiply_keys(int first_key, float (&s)[TILES][KEY_BLOCKS][4]) const {
#pragma unroll
        for (int i = 0; i < TILES * KEY_BLOCKS * 4; ++i) s[i / (KEY_BLOCKS * 4)][i / 4 % KEY_BLOCKS][i % 4] = 0.0f;
        const int key = first_key + warp * WARP_KEYS + lane / 4;
#pragma unroll 2
        for (int group = 0; group < groups; ++group) {
            uint4 unit[KEY_BLOCKS], q[TILES][2];
#pragma unroll
            for (int n = 0; n < KEY_BLOCKS; ++n)
                unit[n] = load_unit(row_at(p, in, 1, key + 8 * n, group * GROUP_BYTES + lane % 4 * UNIT_BYTES));
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) q[m][half] = shared.queries[m][group][half][lane];
            add_group(s, q, unit);
        }
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n)
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (first_key + warp * WARP_KEYS + 8 * n + lane % 4 * 2 + i % 2 >= p.pixels)
                        s[m][n][i] = -INFINITE;
    }

    /// The greatest score of a query among this warp's keys, for the other warps.
    __device__ __forceinline__ void store_maximum(const float (&s)[TILES][KEY_BLOCKS][4]) const {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float most = -INFINITE;
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                if (lane % 4 == 0) shared.maximum[warp][16 * m + 8 * r + lane / 4] = most;
            }
    }

    /// Scores become probabilities, relative to the greatest score so far.
    __device__ __forceinline__ void store_probabilities(const float (&s)[TILES][KEY_BLOCKS][4],
                                                        const float (&maximum)[TILES][2]) const {
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float base = maximum[m][r] * LOG2E;
                const int query = 16 * m + 8 * r + lane / 4;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < KEY_BLOCKS; ++n) {
                    const float x = exp2_volatile(s[m][n][2 * r] * LOG2E - base);
                    const float y = exp2_volatile(s[m][n][2 * r + 1] * LOG2E - base);
                    sum += x + y;
                    Element* const to = &shared.probabilities[query][warp * WARP_KEYS + 8 * n + lane % 4 * 2];
                    *reinterpret_cast<Pair*>(to) = pack2(x, y);
                }
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (lane % 4 == 0) shared.sum[warp][query] = sum;
            }
    }

    /// Operands of a product: probabilities of a tile's queries for some keys.
    __device__ __forceinline__ void load_probabilities(int m, int key, u32 (&a)[4]) const {
#ifdef VVAE_FP32
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = __float_as_uint(shared.probabilities[16 * m + i % 2 * 8 + lane / 4][key + i / 2 * 4 + lane % 4]);
#else
        ldmatrix_x4(a, smem_address(&shared.probabilities[16 * m + lane % 16][key + lane / 16 * 8]));
#endif
    }

    /// Adds the values of some keys, for one slice of channels. Column g of block j is channel j of half unit g.
    __device__ __forceinline__ void add_values(float (&out)[TILES][SLICE_BLOCKS][4], const u32 (&a)[TILES][4],
                                               int key, int slice) const {
        const int byte = slice * SLICE_BYTES + lane / 4 * (UNIT_BYTES / 2), t = lane % 4;
        const auto load = [&](int pixel) { return load_half_unit(row_at(p, in, 2, key + pixel, byte)); };
#ifdef VVAE_FP32
        const uint2 low = load(t), high = load(4 + t);
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            mma_long_sum(out[m][0], a[m], low.x, high.x);
            mma_long_sum(out[m][1], a[m], low.y, high.y);
        }
#else
        const uint2 low[2] = {load(2 * t), load(2 * t + 1)}, high[2] = {load(8 + 2 * t), load(8 + 2 * t + 1)};
#pragma unroll
        for (int j = 0; j < SLICE_BLOCKS; ++j) {
            const u32 select = j % 2 ? 0x7632 : 0x5410;
            const u32 b0 = __byte_perm(j < 2 ? low[0].x : low[0].y, j < 2 ? low[1].x : low[1].y, select);
            const u32 b1 = __byte_perm(j < 2 ? high[0].x : high[0].y, j < 2 ? high[1].x : high[1].y, select);
#pragma unroll
            for (int m = 0; m < TILES; ++m) mma(out[m][j], a[m], b0, b1);
        }
#endif
    }

    /// Divides by the sum of the probabilities, rounds and stores. A lane has whole units.
    __device__ __forceinline__ void store(int frame, int first_query, const float (&sum)[TILES][2],
                                          const float (&out)[SLICES][TILES][SLICE_BLOCKS][4]) const {
        u8* const to = p.out + p.out_slot[frame] * p.out_slot_bytes;
        const int row_bytes = p.channels * ELEMENT_BYTES;
#pragma unroll
        for (int i = 0; i < SLICES; ++i)
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int query = first_query + 16 * m + 8 * r + lane / 4;
                    const float scale = 1.0f / sum[m][r];
                    const int byte = (warp + i * WARPS) * SLICE_BYTES + lane % 4 * UNIT_BYTES;
                    float x[UNIT_CHANNELS];
#pragma unroll
                    for (int c = 0; c < UNIT_CHANNELS; ++c)
                        x[c] = out[i][m][c % SLICE_BLOCKS][2 * r + c / SLICE_BLOCKS] * scale;
                    if (query < p.pixels && byte < row_bytes)
                        *reinterpret_cast<uint4*>(to + static_cast<i64>(query) * row_bytes + byte) = pack_unit(x);
                }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_wide(const __grid_constant__ AttentionParams p) {
    begin_launch();
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, frame = blockIdx.y;
    const int first_query = p.first_query + blockIdx.x * QUERIES;
    const int groups = (p.channels * ELEMENT_BYTES + GROUP_BYTES - 1) / GROUP_BYTES;
    const Attention attention = {p, shared, p.in + p.in_slot[frame] * p.in_slot_bytes, warp, lane, groups};
    attention.load_queries(first_query);

    float out[SLICES][TILES][SLICE_BLOCKS][4] = {};
    float maximum[TILES][2], sum[TILES][2] = {};
#pragma unroll
    for (int m = 0; m < TILES; ++m) maximum[m][0] = maximum[m][1] = -INFINITE;
#pragma unroll 1
    for (int first_key = 0; first_key < p.pixels; first_key += KEYS) {
        // Queries are there, and nobody reads the probabilities of the step before any more.
        __syncthreads();
        float s[TILES][KEY_BLOCKS][4];
        attention.multiply_keys(first_key, s);
        attention.store_maximum(s);
        __syncthreads();
        float rescale[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float most = maximum[m][r];
                for (int w = 0; w < WARPS; ++w) most = fmaxf(most, shared.maximum[w][16 * m + 8 * r + lane / 4]);
                rescale[m][r] = exp2_volatile((maximum[m][r] - most) * LOG2E);
                maximum[m][r] = most;
            }
        attention.store_probabilities(s, maximum);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float step = 0.0f;
                for (int w = 0; w < WARPS; ++w) step += shared.sum[w][16 * m + 8 * r + lane / 4];
                sum[m][r] = fmaf(sum[m][r], rescale[m][r], step);
#pragma unroll
                for (int i = 0; i < SLICES; ++i)
#pragma unroll
                    for (int j = 0; j < SLICE_BLOCKS; ++j)
#pragma unroll
                        for (int e = 0; e < 2; ++e) out[i][m][j][2 * r + e] *= rescale[m][r];
            }
#pragma unroll 1
        for (int key = 0; key < KEYS; key += K_STEP) {
            u32 a[TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; ++m) attention.load_probabilities(m, key, a[m]);
#pragma unroll
            for (int i = 0; i < SLICES; ++i) attention.add_values(out[i], a, first_key + key, warp + i * WARPS);
        }
    }
    attention.store(frame, first_query, sum, out);
}
