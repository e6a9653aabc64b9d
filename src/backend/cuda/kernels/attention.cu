// Attention with one wide head (up to 512 channels) over all pixels of a frame, with a running softmax.
//
// A block computes tiles of 16 queries and loads a few keys and values at a time, values one step ahead, keys two. Two
// warps (four in f32) split the channels of a query tile. For the scores, each warp sums its channels of the inner
// product, and they exchange these sums. For the values, each computes its channels of the output. So a warp's queries
// (64 registers) and outputs (128; 64 in f32) stay in registers, and shared memory holds keys, values, and the scores
// that warps exchange.
//
// The scores of a step are computed while the step before is finished. So they are exchanged at the barrier that lets
// keys and values in, and one warp's products run beside another's exponentials.
#include "ampere.cuh"
#include "attention.cuh"

constexpr int THREADS = 256;
constexpr int QUERIES_2B = 64;  // queries of a block: 2-byte elements
constexpr int QUERIES_4B = 32;  // 4-byte elements
constexpr int QUERIES = ELEMENT_BYTES == 4 ? QUERIES_4B : QUERIES_2B;
constexpr int SHARED_BYTES = 81920;  // dynamic shared memory. f32 uses less

constexpr int ROW_BYTES = MAX_CHANNELS * ELEMENT_BYTES;  // a key or value in shared memory
constexpr int SPLITS = ELEMENT_BYTES;                    // warps that split the channels of a query tile
constexpr int WARP_CHANNELS = MAX_CHANNELS / SPLITS;
static_assert(QUERIES == 16 * (THREADS / 32 / SPLITS));
constexpr int K_STEP = K_STEP_BYTES / ELEMENT_BYTES;  // channels or keys of one product
constexpr int KEYS = 64 * 1024 / (4 * ROW_BYTES);     // keys of a step: 64 KiB for two steps of keys and values

struct Shared {
    u8 rows[2][2][KEYS][ROW_BYTES];               // [keys, values][stage], swizzled
    float scores[2][THREADS / 32][KEYS / 2][32];  // of a warp's channels, [stage][warp][register][lane]
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "dynamic shared memory of a launch");

/// XOR mask of a row's 16-byte units. Matrices are 8 rows of one unit; those of f32 values are every other row of two.
__device__ __forceinline__ int swizzle(int row, bool values) { return row & (values && ELEMENT_BYTES == 4 ? 6 : 7); }

#ifdef VVAE_FP32
/// Keeps the compiler from hoisting the tf32 split of the queries out of the loop: it would need twice the registers.
__device__ __forceinline__ void keep_unsplit(u32 (&x)[4]) {
    asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3]));
}

/// Probabilities of block n of 8 keys. This lane has keys 2t and 2t+1; the product takes them for columns t and t+4.
/// Values are loaded to match.
template <int STEPS>
__device__ __forceinline__ void set_probabilities(u32 (&probability)[STEPS][4], int n, int r, float a, float b) {
    probability[n][r] = __float_as_uint(a);
    probability[n][2 + r] = __float_as_uint(b);
}

/// Offset of this lane's first value: key 2 t, channel lane / 4 of the first 8.
__device__ __forceinline__ u32 value_offset(int lane, int split) {
    const int row = 2 * (lane & 3), channel = split * WARP_CHANNELS + lane / 4;
    return row * ROW_BYTES + ((channel / UNIT_CHANNELS ^ swizzle(row, true)) << 4) +
           channel % UNIT_CHANNELS * ELEMENT_BYTES;
}

/// ldmatrix transposes only 2-byte elements, so values are loaded one by one.
__device__ __forceinline__ void add_values(float (&out)[WARP_CHANNELS / 8][4], const u32 (&probability)[4], u32 address,
                                           u32 offset) {
#pragma unroll
    for (int n = 0; n < WARP_CHANNELS / 8; ++n) {
        const u32 at = (address ^ (n % 4 << 5)) + offset + n / 4 * 128;
        mma_long_sum(out[n], probability, load_shared_u32(at), load_shared_u32(at + ROW_BYTES));
    }
}
#else
__device__ __forceinline__ void keep_unsplit(u32 (&)[4]) {}

template <int STEPS>
__device__ __forceinline__ void set_probabilities(u32 (&probability)[STEPS][4], int n, int r, float a, float b) {
    probability[n / 2][n % 2 * 2 + r] = pack2(a, b);
}

/// What this lane passes to ldmatrix: key and unit of 8 channels.
__device__ __forceinline__ u32 value_offset(int lane, int split) {
    return (lane & 15) * ROW_BYTES +
           (((split * WARP_CHANNELS / UNIT_CHANNELS + (lane >> 4)) ^ swizzle(lane, true)) << 4);
}

__device__ __forceinline__ void add_values(float (&out)[WARP_CHANNELS / 8][4], const u32 (&probability)[4], u32 address,
                                           u32 offset) {
#pragma unroll
    for (int n = 0; n < WARP_CHANNELS / 16; ++n) {
        u32 b[4];
        ldmatrix_x4_trans(b, (address ^ (n % 4 << 5)) + offset + n / 4 * 128);
        mma(out[2 * n], probability, b[0], b[1]);
        mma(out[2 * n + 1], probability, b[2], b[3]);
    }
}
#endif

/// Loads keys or values from pixel `first` on; zeros beyond the last pixel and channel.
__device__ __forceinline__ void load_rows(const AttentionParams& p, const u8* in, bool values, int first, u32 to) {
    constexpr int UNITS = ROW_BYTES / UNIT_BYTES, ROWS = THREADS / UNITS;
    const u32 thread = thread_now();
    const int row = thread / UNITS, unit = thread % UNITS, pixel_bytes = p.channels * 3 * ELEMENT_BYTES;
    const u8* at = in + static_cast<i64>(first + row) * pixel_bytes +
                   ((values ? 2 : 1) * p.channels * ELEMENT_BYTES + unit * UNIT_BYTES);
    const int pixels = unit * UNIT_CHANNELS < p.channels ? p.pixels : 0;
#pragma unroll
    for (int i = 0; i < KEYS; i += ROWS, at += ROWS * pixel_bytes)
        cp_async_16(to + (row + i) * ROW_BYTES + ((unit ^ swizzle(row + i, values)) << 4), at,
                    first + row + i < pixels);
}

/// Loads the queries of a lane as mma fragments; zeros beyond the last pixel and channel.
__device__ __forceinline__ void load_queries(const AttentionParams& p, const u8* in, int query, int split, int t,
                                             u32 (&q)[WARP_CHANNELS / K_STEP][4]) {
#pragma unroll
    for (int k = 0; k < WARP_CHANNELS / K_STEP; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pixel = query + i % 2 * 8;
            const int byte = split * WARP_CHANNELS * ELEMENT_BYTES + k * K_STEP_BYTES + i / 2 * 16 + t * 4;
            const bool valid = pixel < p.pixels && byte < p.channels * ELEMENT_BYTES;
            q[k][i] = valid ? __ldg(reinterpret_cast<const u32*>(
                                  in + static_cast<i64>(pixel) * p.channels * 3 * ELEMENT_BYTES + byte))
                            : 0;
        }
}

/// One step of the running softmax: scores `s` become probabilities, relative to the new maximum. Outputs and sums so
/// far are rescaled to it.
__device__ __forceinline__ void softmax_step(const float (&s)[KEYS / 8][4], float (&maximum)[2], float (&sum)[2],
                                             float (&out)[WARP_CHANNELS / 8][4], u32 (&probability)[KEYS / K_STEP][4]) {
    float new_maximum[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) new_maximum[i / 2 % 2] = fmaxf(new_maximum[i / 2 % 2], s[i / 4][i % 4]);
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        new_maximum[r] = fmaxf(new_maximum[r], __shfl_xor_sync(~0u, new_maximum[r], 1));
        new_maximum[r] = fmaxf(new_maximum[r], __shfl_xor_sync(~0u, new_maximum[r], 2));
        rescale[r] = exp2_volatile((maximum[r] - new_maximum[r]) * LOG2E);
    }
    // The maximum rarely changes after the first few keys.
    if (__any_sync(~0u, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] *= rescale[i / 2];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        maximum[r] = new_maximum[r];
        sum[r] *= rescale[r];
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float base = maximum[r] * LOG2E;
            const float a = exp2_volatile(s[n][2 * r] * LOG2E - base);
            const float b = exp2_volatile(s[n][2 * r + 1] * LOG2E - base);
            sum[r] += a + b;
            set_probabilities(probability, n, r, a, b);
        }
}

/// Divides by the sum of the probabilities, rounds and stores.
__device__ __forceinline__ void store_output(const AttentionParams& p, int frame, int query, int split, int t,
                                             float (&sum)[2], const float (&out)[WARP_CHANNELS / 8][4]) {
    u8* to = p.out + p.out_slot[frame] * p.out_slot_bytes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const int pixel = query + 8 * r;
        if (pixel >= p.pixels) continue;
        const float scale = 1.0f / sum[r];
#pragma unroll
        for (int n = 0; n < WARP_CHANNELS / 8; ++n) {
            const int channel = split * WARP_CHANNELS + n * 8 + 2 * t;
            if (channel < p.channels)
                *reinterpret_cast<Pair*>(to + (static_cast<i64>(pixel) * p.channels + channel) * ELEMENT_BYTES) =
                    pack2(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ AttentionParams p) {
    begin_launch();
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    constexpr int STAGE = KEYS * ROW_BYTES, SCORES = KEYS / 2;
    const u32 keys = smem_address(shared.rows[0]), values = smem_address(shared.rows[1]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int query_tile = warp / SPLITS, split = warp % SPLITS;
    const int frame = blockIdx.y;
    const u8* in = p.in + p.in_slot[frame] * p.in_slot_bytes;
    load_rows(p, in, false, 0, keys);
    cp_async_commit();
    load_rows(p, in, true, 0, values);
    load_rows(p, in, false, KEYS, keys + STAGE);
    cp_async_commit();

    const int query = p.first_query + blockIdx.x * QUERIES + query_tile * 16 + lane / 4;  // and query + 8
    u32 q[WARP_CHANNELS / K_STEP][4];
    load_queries(p, in, query, split, t, q);

    // What this lane passes to ldmatrix: 16 keys of one K step, or 8 keys of two.
    constexpr bool EIGHT_KEYS = KEYS == 8;
    const int key_row = (lane & 7) + (EIGHT_KEYS ? 0 : (lane >> 4) << 3);
    const int key_unit = split * WARP_CHANNELS / UNIT_CHANNELS + (EIGHT_KEYS ? lane >> 3 : (lane >> 3) & 1);
    const u32 key_address = keys + key_row * ROW_BYTES + ((key_unit ^ swizzle(lane, false)) << 4);
    const u32 value_address = values + value_offset(lane, split);

    /// The warp's share of the scores, from its channels.
    const auto add_scores = [&](u32 stage, float(&s)[KEYS / 8][4]) {
#pragma unroll
        for (int i = 0; i < SCORES; ++i) s[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < WARP_CHANNELS / K_STEP; ++k) {
            keep_unsplit(q[k]);
            u32 b[4];
            if (EIGHT_KEYS && k % 2 == 0) {
                ldmatrix_x4(b, (key_address ^ (k % 4 << 5)) + stage + k / 4 * 128);
                mma(s[0], q[k], b[0], b[1]);
                keep_unsplit(q[k + 1]);
                mma(s[0], q[k + 1], b[2], b[3]);
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                ldmatrix_x4(b, (key_address ^ (k % 4 << 5)) + stage + n * 16 * ROW_BYTES + k / 4 * 128);
                mma(s[2 * n], q[k], b[0], b[1]);
                mma(s[2 * n + 1], q[k], b[2], b[3]);
            }
        }
    };

    float out[WARP_CHANNELS / 8][4] = {};
    float maximum[2] = {-INFINITE, -INFINITE}, sum[2] = {};  // of query and query + 8
    float s[KEYS / 8][4];
    cp_async_wait<1>();
    __syncthreads();
    add_scores(0, s);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) shared.scores[0][warp][i][lane] = s[i / 4][i % 4];
    for (int first = 0, stage = 0; first < p.pixels; first += KEYS, stage ^= 1) {
        // This step's values, the next one's keys and the other warps' scores have arrived. Their former places are
        // free.
        cp_async_wait<0>();
        __syncthreads();
        load_rows(p, in, true, first + KEYS, values + (stage ^ 1) * STAGE);
        load_rows(p, in, false, first + 2 * KEYS, keys + stage * STAGE);
        cp_async_commit();
        // After the last key these scores are zeros, and nobody reads them.
        float next[KEYS / 8][4];
        add_scores((stage ^ 1) * STAGE, next);

#pragma unroll
        for (int w = 1; w < SPLITS; ++w)
#pragma unroll
            for (int i = 0; i < SCORES; ++i) s[i / 4][i % 4] += shared.scores[stage][warp ^ w][i][lane];
        if (first + KEYS > p.pixels) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (first + i / 4 * 8 + 2 * t + i % 2 >= p.pixels) s[i / 4][i % 4] = -INFINITE;
        }
        u32 probability[KEYS / K_STEP][4];
        softmax_step(s, maximum, sum, out, probability);
#pragma unroll
        for (int k = 0; k < KEYS / K_STEP; ++k)
            add_values(out, probability[k], value_address, stage * STAGE + k * K_STEP * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            s[i / 4][i % 4] = next[i / 4][i % 4];
            shared.scores[stage ^ 1][warp][i][lane] = next[i / 4][i % 4];
        }
    }
    cp_async_wait<0>();

    store_output(p, frame, query, split, t, sum, out);
}
