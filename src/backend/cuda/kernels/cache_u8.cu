// Rows of causal caches in 8 bits. What is cached follows SiLU: nothing is below -0.2785, and most is near it. So a value
// is stored as the square root of its distance from there, in steps of a scale. A block of channels of a pixel shares it.
#include "norm.cuh"

constexpr float LEAST = -0.2786f;
constexpr float MOST_SCALE = 65504.0f;  // of f16
constexpr u32 STEPS = 255;

struct CacheParams {
    const u8* from[MAX_FRAMES];  // the first row of each frame's part
    u8* to[MAX_FRAMES];
    i64 from_pitch, to_pitch;  // bytes between adjacent rows
    u32 row_units;             // of a row's pixels
    u32 units;                 // of all rows
    u32 pixel_bytes;           // in 8 bits, of a row's pixels; their scales follow
    int block_units;           // units of channels that share a scale: a power of two, at most 16
};

/// The channels of a unit in 8 bits.
struct alignas(UNIT_CHANNELS) Codes {
    u8 code[UNIT_CHANNELS];
};

/// The greater one, or NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

__device__ __forceinline__ float min_or_nan(float x, float y) {
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

__device__ __forceinline__ float square_root(float x) {
    asm("sqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

__device__ __forceinline__ u16 pack_scale(float scale) {
    u16 packed;
    asm("cvt.rp.f16.f32 %0, %1;" : "=h"(packed) : "f"(scale));
    return packed;
}

__device__ __forceinline__ float unpack_scale(u16 packed) {
    float scale;
    asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"(packed));
    return scale;
}

/// The scale of a block whose threads have its units. Rounded up, so that the greatest value keeps its place. NaN where
/// a value is no number or infinite.
__device__ __forceinline__ u16 block_scale(const float (&x)[UNIT_CHANNELS], int block_units) {
    float most = 1e-8f;
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) most = max_or_nan(most, __fsub_rn(x[i], LEAST));
    for (int i = block_units / 2; i >= 1; i /= 2) most = max_or_nan(most, __shfl_xor_sync(~0u, most, i));
    // An infinity less itself is no number.
    const float scale = __fmaf_rn(square_root(most), 1.0f / STEPS, __fsub_rn(most, most));
    return pack_scale(min_or_nan(scale, MOST_SCALE));
}

__device__ __forceinline__ Codes encode(const float (&x)[UNIT_CHANNELS], float scale) {
    Codes codes;
    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) {
        const float root = square_root(fmaxf(__fsub_rn(x[i], LEAST), 0.0f));
        codes.code[i] = min(__float2uint_rn(__fmul_rn(root, reciprocal)), STEPS);
    }
    return codes;
}

__device__ __forceinline__ uint4 decode(const Codes& codes, float scale) {
    float x[UNIT_CHANNELS];
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) {
        const float root = __fmul_rn(codes.code[i], scale);
        x[i] = __fmaf_rn(root, root, LEAST);
    }
    return pack_unit(x);
}

/// Copies rows. Either side is in 8 bits or as it is.
template <bool FROM_U8, bool TO_U8>
__device__ __forceinline__ void copy(const CacheParams& p) {
    const u8* from = p.from[blockIdx.y];
    u8* to = p.to[blockIdx.y];
    const u32 step = gridDim.x * blockDim.x, lane = threadIdx.x % 32;
    // All threads of a warp stay together: they exchange values.
    for (u32 first = blockIdx.x * blockDim.x + threadIdx.x - lane; first < p.units; first += step) {
        const u32 unit = first + lane;
        const bool inside = unit < p.units;
        const u32 row = inside ? unit / p.row_units : 0, column = inside ? unit % p.row_units : 0;
        const u8* from_row = from + row * p.from_pitch;
        u8* to_row = to + row * p.to_pitch;
        const u32 scale_at = p.pixel_bytes + column / p.block_units * sizeof(u16);
        Codes codes;
        u16 packed;
        if (FROM_U8) {
            codes = *reinterpret_cast<const Codes*>(from_row + column * UNIT_CHANNELS);
            packed = *reinterpret_cast<const u16*>(from_row + scale_at);
        } else {
            float x[UNIT_CHANNELS];
            unpack_unit(load_once(from_row + column * UNIT_BYTES), x);
            packed = block_scale(x, p.block_units);
            codes = encode(x, unpack_scale(packed));
        }
        if (!inside) continue;
        if (TO_U8) {
            *reinterpret_cast<Codes*>(to_row + column * UNIT_CHANNELS) = codes;
            if (column % p.block_units == 0) *reinterpret_cast<u16*>(to_row + scale_at) = packed;
        } else {
            *reinterpret_cast<uint4*>(to_row + column * UNIT_BYTES) = decode(codes, unpack_scale(packed));
        }
    }
}

extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) cache_store(const __grid_constant__ CacheParams p) {
    begin_launch();
    copy<false, true>(p);
}

extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) cache_restore(const __grid_constant__ CacheParams p) {
    begin_launch();
    copy<true, false>(p);
}

/// To 8 bits and back, as a cache would.
extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) cache_round(const __grid_constant__ CacheParams p) {
    begin_launch();
    copy<false, false>(p);
}
