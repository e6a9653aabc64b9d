// Attention with one wide head (up to 512 channels) over all pixels of a frame, with a running softmax: the score
// matrix never exists.
//
// A block takes 64 queries, in four bands of 16, and goes through the keys 32 (or 16) at a time, the next ones on their
// way. Two warps share a band; each
// has one half of the channels. For the scores both add up their half of the inner product, exchange, and then know
// the full scores of the band; for the values each makes its half of the output. So a warp's queries (64 registers)
// and its part of the output (128 registers) stay in registers throughout, and shared memory holds keys and values only.
#include "ampere.cuh"

constexpr int WIDTH = 512, HALF = WIDTH / 2;
constexpr int QUERIES = 64;
constexpr int THREADS = 256;
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
    // [stage][keys, values]; 16-byte units of a row swizzled by its lowest three bits
    u8 rows[2][2][KEYS][WIDTH * 2];
    float scores[8][KEYS / 2][32];  // of a warp's half of the channels: [warp][register][lane]
};

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/// Keys and values from pixel `first` on; zeros beyond the last pixel and the last channel.
template <int KEYS>
__device__ __forceinline__ void fetch(const AttentionParams& p, const u8* in, int first, u32 to) {
    const int unit = threadIdx.x % 64;
    const i64 row = static_cast<i64>(p.channels) * 6;
#pragma unroll 1
    for (int i = threadIdx.x / 64; i < 2 * KEYS; i += THREADS / 64) {
        const int part = i / KEYS, pixel = first + i % KEYS;
        const bool valid = pixel < p.pixels && unit * 8 < p.channels;
        copy16(to + i * WIDTH * 2 + ((unit ^ (i & 7)) << 4),
               valid ? in + pixel * row + (part + 1) * p.channels * 2 + unit * 16 : in, valid);
    }
    copy_commit();
}

template <int KEYS>
__device__ __forceinline__ void attend(const AttentionParams& p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared<KEYS>& shared = *reinterpret_cast<Shared<KEYS>*>(memory);
    constexpr int STAGE = 2 * KEYS * WIDTH * 2, SCORES = KEYS / 2;
    const u32 rows = smem_address(shared.rows);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int band = warp / 2, half = warp % 2;
    const int frame = blockIdx.y;
    const u8* in = p.in + p.in_slot[frame] * p.in_slot_bytes;
    fetch<KEYS>(p, in, 0, rows);

    const int query = blockIdx.x * QUERIES + band * 16 + lane / 4;  // and query + 8
    u32 q[HALF / 16][4];
#pragma unroll
    for (int k = 0; k < HALF / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pixel = query + i % 2 * 8, channel = half * HALF + k * 16 + i / 2 * 8 + 2 * t;
            const bool valid = pixel < p.pixels && channel < p.channels;
            q[k][i] = valid ? __ldg(reinterpret_cast<const u32*>(in + static_cast<i64>(pixel) * p.channels * 6 + channel * 2)) : 0;
        }

    // What this lane hands to ldmatrix: key row and unit of 8 channels, for keys and (transposed) for values.
    const int key_row = (lane & 7) + ((lane >> 4) << 3), key_unit = half * HALF / 8 + ((lane >> 3) & 1);
    const int value_row = lane & 15, value_unit = half * HALF / 8 + (lane >> 4);
    const u32 key_place = rows + key_row * WIDTH * 2 + ((key_unit ^ (lane & 7)) << 4);
    const u32 value_place = rows + KEYS * WIDTH * 2 + value_row * WIDTH * 2 + ((value_unit ^ (lane & 7)) << 4);
    float(*mine)[32] = shared.scores[warp], (*other)[32] = shared.scores[warp ^ 1];

    float out[HALF / 8][4] = {};
    float top[2] = {-INFINITE, -INFINITE}, sum[2] = {};  // of query and query + 8
    u32 stage = 0;
    for (int first = 0; first < p.pixels; first += KEYS, stage ^= STAGE) {
        copy_wait<0>();
        __syncthreads();  // everyone's copies have come, and nobody uses the other stage any more
        const int next = first + KEYS;
        if (next < p.pixels) fetch<KEYS>(p, in, next, rows + (stage ^ STAGE));
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < HALF / 16; ++k)
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                u32 b[4];
                load_matrices(b, (key_place ^ (k % 4 << 5)) + stage + n * 16 * WIDTH * 2 + k / 4 * 128);
                mma(s[2 * n], q[k], b[0], b[1]);
                mma(s[2 * n + 1], q[k], b[2], b[3]);
            }
#pragma unroll
        for (int i = 0; i < SCORES; ++i) mine[i][lane] = s[i / 4][i % 4];
        asm volatile("bar.sync %0, 64;" ::"r"(1 + band) : "memory");  // the two warps of the band
#pragma unroll
        for (int i = 0; i < SCORES; ++i) s[i / 4][i % 4] += other[i][lane];

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
            for (int n = 0; n < HALF / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[n][i] *= fade[i / 2];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = highest[r];
            sum[r] *= fade[r];
        }
        u32 weight[KEYS / 16][4];
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float base = top[r] * 1.4426950408889634f;
                const float a = exp2_volatile(s[n][2 * r] * 1.4426950408889634f - base), b = exp2_volatile(s[n][2 * r + 1] * 1.4426950408889634f - base);
                sum[r] += a + b;
                weight[n / 2][n % 2 * 2 + r] = pack2(a, b);
            }

#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
            for (int n = 0; n < HALF / 16; ++n) {
                u32 b[4];
                load_transposed(b, (value_place ^ (n % 4 << 5)) + stage + k * 16 * WIDTH * 2 + n / 4 * 128);
                mma(out[2 * n], weight[k], b[0], b[1]);
                mma(out[2 * n + 1], weight[k], b[2], b[3]);
            }
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
        for (int n = 0; n < HALF / 8; ++n) {
            const int channel = half * HALF + n * 8 + 2 * t;
            if (channel < p.channels)
                *reinterpret_cast<u32*>(to + (static_cast<i64>(pixel) * p.channels + channel) * 2) =
                    pack2(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
        }
    }
}

/// For cards with 144 KiB of shared memory for a block, and for all others.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_32(const __grid_constant__ AttentionParams p) {
    attend<32>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_16(const __grid_constant__ AttentionParams p) {
    attend<16>(p);
}
