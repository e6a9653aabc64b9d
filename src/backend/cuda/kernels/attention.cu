// Attention with one wide head (up to 512 channels) over all pixels of a frame, with a running softmax: the score
// matrix never exists.
//
// A block takes bands of 16 queries and goes through the keys a few at a time, the next ones on their way. Two warps (four
// in f32) share a band; each has its share of the channels. For the scores all add up their share of the inner product,
// exchange, and then know the full scores of the band; for the values each makes its share of the output. So a warp's
// queries (64 registers) and its part of the output (128, in f32 64 registers) stay in registers throughout, and shared
// memory holds keys and values only.
#include "ampere.cuh"

constexpr int WIDTH = 512, ROW = WIDTH * ELEMENT;  // channels and bytes of a key in shared memory
constexpr int SHARES = ELEMENT, SHARE = WIDTH / SHARES;  // warps of a band, channels of a warp
constexpr int THREADS = 256, QUERIES = 16 * (THREADS / 32 / SHARES);
constexpr int STEP = STEP_BYTES / ELEMENT;  // channels or keys of one product
constexpr int MAX_FRAMES = 32;
#define INFINITE __int_as_float(0x7f800000)

struct AttentionParams {
    const u8* in;  // frames [pixel][query, key, value][channels]
    u8* out;       // frames [pixel][channels]
    i64 in_slot_bytes, out_slot_bytes;
    int pixels;
    int channels;  // a multiple of 8, at most 512
    int in_slot[MAX_FRAMES], out_slot[MAX_FRAMES];
};

template <int KEYS>
struct Shared {
    u8 rows[2][2][KEYS][ROW];       // [stage][keys, values], see `swizzle`
    float scores[8][KEYS / 2][32];  // of a warp's share of the channels: [warp][register][lane]
};

/// What the 16-byte units of a row are swizzled by. Matrices of keys, and of values of 2 bytes, are 8 rows of a unit; those
/// of values of 4 bytes are every other row of two units.
__device__ __forceinline__ int swizzle(int row, bool values) { return row & (values && ELEMENT == 4 ? 6 : 7); }

#ifdef VVAE_FP32
/// Keeps the compiler from splitting the queries for products before the loop: twice as many registers there are not.
__device__ __forceinline__ void stay(u32 (&x)[4]) { asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])); }

/// The weights of block n of 8 keys: this lane has those of keys 2 t and 2 t + 1, which the product takes for its columns t
/// and t + 4. Values are loaded to match.
template <int STEPS>
__device__ __forceinline__ void set_weights(u32 (&weight)[STEPS][4], int n, int r, float a, float b) {
    weight[n][r] = __float_as_uint(a);
    weight[n][2 + r] = __float_as_uint(b);
}

/// Where this lane's values lie: key 2 t, channel lane / 4 of the first 8.
__device__ __forceinline__ u32 value_offset(int lane, int share) {
    const int row = 2 * (lane & 3), channel = share * SHARE + lane / 4;
    return row * ROW + ((channel / UNIT ^ swizzle(row, true)) << 4) + channel % UNIT * ELEMENT;
}

/// ldmatrix transposes 2-byte elements alone, so these come one by one.
__device__ __forceinline__ void add_values(float (&out)[SHARE / 8][4], const u32 (&weight)[4], u32 place, u32 offset) {
#pragma unroll
    for (int n = 0; n < SHARE / 8; ++n) {
        const u32 at = (place ^ (n % 4 << 5)) + offset + n / 4 * 128;
        mma_long(out[n], weight, load_word(at), load_word(at + ROW));
    }
}
#else
__device__ __forceinline__ void stay(u32 (&)[4]) {}

template <int STEPS>
__device__ __forceinline__ void set_weights(u32 (&weight)[STEPS][4], int n, int r, float a, float b) {
    weight[n / 2][n % 2 * 2 + r] = pack2(a, b);
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/// What this lane hands to ldmatrix: key and unit of 8 channels.
__device__ __forceinline__ u32 value_offset(int lane, int share) {
    return (lane & 15) * ROW + (((share * SHARE / UNIT + (lane >> 4)) ^ swizzle(lane, true)) << 4);
}

__device__ __forceinline__ void add_values(float (&out)[SHARE / 8][4], const u32 (&weight)[4], u32 place, u32 offset) {
#pragma unroll
    for (int n = 0; n < SHARE / 16; ++n) {
        u32 b[4];
        load_transposed(b, (place ^ (n % 4 << 5)) + offset + n / 4 * 128);
        mma(out[2 * n], weight, b[0], b[1]);
        mma(out[2 * n + 1], weight, b[2], b[3]);
    }
}
#endif

/// Keys and values from pixel `first` on; zeros beyond the last pixel and the last channel.
template <int KEYS>
__device__ __forceinline__ void fetch(const AttentionParams& p, const u8* in, int first, u32 to) {
    constexpr int UNITS = ROW / 16;
    const int unit = threadIdx.x % UNITS;
    const i64 row = static_cast<i64>(p.channels) * 3 * ELEMENT;
#pragma unroll 1
    for (int i = threadIdx.x / UNITS; i < 2 * KEYS; i += THREADS / UNITS) {
        const int part = i / KEYS, pixel = first + i % KEYS;
        const bool valid = pixel < p.pixels && unit * UNIT < p.channels;
        copy16(to + i * ROW + ((unit ^ swizzle(i, part)) << 4),
               valid ? in + pixel * row + (part + 1) * p.channels * ELEMENT + unit * 16 : in, valid);
    }
    copy_commit();
}

template <int KEYS>
__device__ __forceinline__ void attend(const AttentionParams& p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared<KEYS>& shared = *reinterpret_cast<Shared<KEYS>*>(memory);
    constexpr int STAGE = 2 * KEYS * ROW, SCORES = KEYS / 2;
    const u32 rows = smem_address(shared.rows);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int band = warp / SHARES, share = warp % SHARES;
    const int frame = blockIdx.y;
    const u8* in = p.in + p.in_slot[frame] * p.in_slot_bytes;
    fetch<KEYS>(p, in, 0, rows);

    const int query = blockIdx.x * QUERIES + band * 16 + lane / 4;  // and query + 8
    u32 q[SHARE / STEP][4];
#pragma unroll
    for (int k = 0; k < SHARE / STEP; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pixel = query + i % 2 * 8, byte = share * SHARE * ELEMENT + k * STEP_BYTES + i / 2 * 16 + t * 4;
            const bool valid = pixel < p.pixels && byte < p.channels * ELEMENT;
            q[k][i] = valid ? __ldg(reinterpret_cast<const u32*>(in + static_cast<i64>(pixel) * p.channels * 3 * ELEMENT + byte)) : 0;
        }

    // What this lane hands to ldmatrix, for 16 keys and one step, or where there are but 8 keys, for two steps.
    constexpr bool FEW = KEYS == 8;
    const int key_row = (lane & 7) + (FEW ? 0 : (lane >> 4) << 3);
    const int key_unit = share * SHARE / UNIT + (FEW ? lane >> 3 : (lane >> 3) & 1);
    const u32 key_place = rows + key_row * ROW + ((key_unit ^ swizzle(lane, false)) << 4);
    const u32 value_place = rows + KEYS * ROW + value_offset(lane, share);
    float(*mine)[32] = shared.scores[warp];

    float out[SHARE / 8][4] = {};
    float top[2] = {-INFINITE, -INFINITE}, sum[2] = {};  // of query and query + 8
    u32 stage = 0;
    for (int first = 0; first < p.pixels; first += KEYS, stage ^= STAGE) {
        copy_wait<0>();
        __syncthreads();  // everyone's copies have come, and nobody uses the other stage any more
        const int next = first + KEYS;
        if (next < p.pixels) fetch<KEYS>(p, in, next, rows + (stage ^ STAGE));
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < SHARE / STEP; ++k) {
            stay(q[k]);
            u32 b[4];
            if (FEW && k % 2 == 0) {
                load_matrices(b, (key_place ^ (k % 4 << 5)) + stage + k / 4 * 128);
                mma(s[0], q[k], b[0], b[1]);
                stay(q[k + 1]);
                mma(s[0], q[k + 1], b[2], b[3]);
            }
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                load_matrices(b, (key_place ^ (k % 4 << 5)) + stage + n * 16 * ROW + k / 4 * 128);
                mma(s[2 * n], q[k], b[0], b[1]);
                mma(s[2 * n + 1], q[k], b[2], b[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < SCORES; ++i) mine[i][lane] = s[i / 4][i % 4];
        asm volatile("bar.sync %0, %1;" ::"r"(1 + band), "n"(32 * SHARES) : "memory");  // the warps of the band
#pragma unroll
        for (int w = 1; w < SHARES; ++w)
#pragma unroll
            for (int i = 0; i < SCORES; ++i) s[i / 4][i % 4] += shared.scores[warp ^ w][i][lane];

        if (next > p.pixels) {
#pragma unroll
            for (int i = 0; i < SCORES; ++i)
                if (first + i / 4 * 8 + 2 * t + i % 2 >= p.pixels) s[i / 4][i % 4] = -INFINITE;
        }
        float highest[2] = {top[0], top[1]};
#pragma unroll
        for (int i = 0; i < SCORES; ++i) highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], s[i / 4][i % 4]);
        float fade[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
            highest[r] = fmaxf(highest[r], __shfl_xor_sync(~0u, highest[r], 2));
            fade[r] = exp2_volatile((top[r] - highest[r]) * 1.4426950408889634f);
        }
        // The highest score rarely changes after the first few keys.
        if (__any_sync(~0u, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < SHARE / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][i] *= fade[i / 2];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = highest[r];
            sum[r] *= fade[r];
        }
        u32 weight[KEYS / STEP][4];
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float base = top[r] * 1.4426950408889634f;
                const float a = exp2_volatile(s[n][2 * r] * 1.4426950408889634f - base), b = exp2_volatile(s[n][2 * r + 1] * 1.4426950408889634f - base);
                sum[r] += a + b;
                set_weights(weight, n, r, a, b);
            }

#pragma unroll
        for (int k = 0; k < KEYS / STEP; ++k) add_values(out, weight[k], value_place, stage + k * STEP * ROW);
    }

    u8* to = p.out + p.out_slot[frame] * p.out_slot_bytes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        const int pixel = query + 8 * r;
        if (pixel >= p.pixels) continue;
        const float scale = 1.0f / sum[r];
#pragma unroll
        for (int n = 0; n < SHARE / 8; ++n) {
            const int channel = share * SHARE + n * 8 + 2 * t;
            if (channel < p.channels)
                *reinterpret_cast<Pair*>(to + (static_cast<i64>(pixel) * p.channels + channel) * ELEMENT) =
                    pack2(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
        }
    }
}

/// With 128 KiB of keys and values in shared memory, for data-centre cards, and with 64 for all others.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_128(const __grid_constant__ AttentionParams p) {
    attend<128 * 1024 / (4 * ROW)>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_64(const __grid_constant__ AttentionParams p) {
    attend<64 * 1024 / (4 * ROW)>(p);
}
