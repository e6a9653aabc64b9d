// Norms as one multiply-add per channel, followed by SiLU: GroupNorm, and the norm of a pixel by the length of its
// channels.
#pragma once
#include "common.cuh"

constexpr int RECORD_ROWS = 8;  // pixels that one record of statistics covers
constexpr int RECORD_COLS = 16;

// norm_silu and copy_rows prepare the next band while conv_wgmma computes one. So a block of this size must fit on a
// multiprocessor beside a block of conv_wgmma.
constexpr int CORESIDENT_THREADS = 128;
constexpr int CORESIDENT_REGISTERS = 56;

/// Statistics of the frames, and weights of the layer. The norm of a pixel reads gamma alone.
struct Norm {
    const float2* statistics;  // slot 0, [groups]: mean, 1 / deviation
    const float* gamma;        // padded with zeros to a multiple of 64 channels, like beta
    const float* beta;
    i64 stride;  // between the statistics of adjacent slots, in float2
    int groups;
    int group_channels;
};

/// An explicit fma: a compiler that may contract could round differently in two kernels that must agree bit for bit.
__device__ __forceinline__ float shift_of(float mean, float scale, float beta) { return fmaf(-mean, scale, beta); }

/// Scale and shift of a channel; zeros beyond `channels`, where there may be no weights.
__device__ __forceinline__ float2 scale_and_shift(const Norm& norm, i64 slot, int channel, int channels) {
    const bool valid = channel < channels;
    // Padding channels have gamma = beta = 0, so any group will do.
    const float2 s = __ldg(norm.statistics + slot * norm.stride + min(channel / norm.group_channels, norm.groups - 1));
    const float scale = valid ? s.y * __ldg(norm.gamma + channel) : 0.0f;
    return make_float2(scale, valid ? shift_of(s.x, scale, __ldg(norm.beta + channel)) : 0.0f);
}

/// All channels go through one stage at a time, so special-function latencies overlap even with few warps.
template <bool SILU, int COUNT>
__device__ __forceinline__ void normalise(float (&x)[COUNT], const float (&scale)[COUNT], const float (&shift)[COUNT]) {
    float s[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = x[i] * scale[i] + shift[i];
    if (SILU) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) s[i] = exp2_volatile(x[i] * -LOG2E);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) s[i] = reciprocal_volatile(1.0f + s[i]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] *= s[i];
    }
}

/// The norm of one unit of channels, held in registers.
struct UnitNorm {
    float scale[UNIT_CHANNELS], shift[UNIT_CHANNELS];

    __device__ __forceinline__ void load(const Norm& norm, i64 slot, int channel) {
        const float2* statistics = norm.statistics + slot * norm.stride;
        int group = channel / norm.group_channels, left = norm.group_channels - channel % norm.group_channels;
#pragma unroll
        for (int i = 0; i < UNIT_CHANNELS; ++i) {
            // Padding channels have gamma = beta = 0, so any group will do.
            const float2 s = __ldg(statistics + min(group, norm.groups - 1));
            scale[i] = s.y * __ldg(norm.gamma + channel + i);
            shift[i] = shift_of(s.x, scale[i], __ldg(norm.beta + channel + i));
            if (--left == 0) {
                left = norm.group_channels;
                ++group;
            }
        }
    }

    /// `pairs`: scale and shift of each channel.
    __device__ __forceinline__ void load(const float2* pairs) {
#pragma unroll
        for (int i = 0; i < UNIT_CHANNELS; ++i) scale[i] = pairs[i].x, shift[i] = pairs[i].y;
    }

    template <bool SILU>
    __device__ __forceinline__ uint4 apply(uint4 packed) const {
        float x[UNIT_CHANNELS];
        unpack_unit(packed, x);
        normalise<SILU>(x, scale, shift);
        return pack_unit(x);
    }
};

/// Lanes that share a pixel in its norm. Lane t has units t, t + lanes, and so on. It adds up their squares in this
/// order; then lanes are added up in pairs. So the number of channels alone fixes the order.
__device__ __forceinline__ int pixel_lanes(int channels) {
    return channels <= 128 ? 4 : channels <= 256 ? 8 : channels <= 512 ? 16 : 32;
}

/// `sum` plus the squares of a unit.
__device__ __forceinline__ float add_squares(uint4 unit, float sum) {
    float x[UNIT_CHANNELS];
    unpack_unit(unit, x);
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) sum = fmaf(x[i], x[i], sum);
    return sum;
}

/// 1 / length of a pixel, from the sums of squares of its lanes. All lanes of the warp take part.
__device__ __forceinline__ float inverse_length(float sum, int lanes) {
    for (int i = 1; i < lanes; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    const float length = sqrtf(sum);
    return 1.0f / (length < 1e-12f ? 1e-12f : length);  // NaN stays NaN
}

template <bool SILU>
__device__ __forceinline__ uint4 normalise_unit(uint4 packed, float inverse, const float (&gamma)[UNIT_CHANNELS]) {
    float x[UNIT_CHANNELS], scale[UNIT_CHANNELS], shift[UNIT_CHANNELS] = {};
    unpack_unit(packed, x);
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) scale[i] = inverse * gamma[i];
    normalise<SILU>(x, scale, shift);
    return pack_unit(x);
}
