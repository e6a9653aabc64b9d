// GroupNorm as one multiply-add per channel, and SiLU after it.
#pragma once
#include "numeric.cuh"

/// What a norm needs to know about its input: statistics lie with the frames, weights with the layer.
struct Norm {
    const float2* statistics;  // of slot 0, [groups]: mean, 1 / deviation
    const float* gamma;        // padded with zeros to a multiple of 64 channels, like beta
    const float* beta;
    i64 stride;                // from one frame's statistics to the next
    int groups;
    int group_channels;
};

/// Rounded once in so many words: an assembler that may choose could choose otherwise in another kernel, whose bits are to be
/// the same.
__device__ __forceinline__ float shift_of(float mean, float scale, float beta) { return fmaf(-mean, scale, beta); }

/// Scale and shift of a channel; zeros for those that are no part of a frame, of which there may be no weights either.
__device__ __forceinline__ float2 scale_and_shift(const Norm& norm, i64 slot, int channel, int channels) {
    // Padding channels have gamma = beta = 0, so any group does for them.
    const bool known = channel < channels;
    const float2 s = __ldg(norm.statistics + slot * norm.stride + min(channel / norm.group_channels, norm.groups - 1));
    const float scale = known ? s.y * __ldg(norm.gamma + channel) : 0.0f;
    return make_float2(scale, known ? shift_of(s.x, scale, __ldg(norm.beta + channel)) : 0.0f);
}

/// In stages of all channels, so that the latencies of the special functions overlap even when a few warps are all there are.
template <bool SILU, int COUNT>
__device__ __forceinline__ void normalise(float (&x)[COUNT], const float (&scale)[COUNT], const float (&shift)[COUNT]) {
    float s[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = x[i] * scale[i] + shift[i];
    if (SILU) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) s[i] = exp2_volatile(x[i] * -1.4426950408889634f);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) s[i] = reciprocal_volatile(1.0f + s[i]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] *= s[i];
    }
}

/// The norm of a unit of neighbouring channels, for a thread that stays with them.
struct UnitNorm {
    float scale[UNIT], shift[UNIT];

    __device__ __forceinline__ void load(const Norm& norm, i64 slot, int channel) {
        const float2* statistics = norm.statistics + slot * norm.stride;
        int group = channel / norm.group_channels, left = norm.group_channels - channel % norm.group_channels;
#pragma unroll
        for (int i = 0; i < UNIT; ++i) {
            // Padding channels have gamma = beta = 0, so any group does for them.
            const float2 s = __ldg(statistics + min(group, norm.groups - 1));
            scale[i] = s.y * __ldg(norm.gamma + channel + i);
            shift[i] = shift_of(s.x, scale[i], __ldg(norm.beta + channel + i));
            if (--left == 0) {
                left = norm.group_channels;
                ++group;
            }
        }
    }

    /// From scale and shift of the unit's channels.
    __device__ __forceinline__ void load(const float2* pairs) {
#pragma unroll
        for (int i = 0; i < UNIT; ++i) scale[i] = pairs[i].x, shift[i] = pairs[i].y;
    }

    template <bool SILU>
    __device__ __forceinline__ uint4 apply(uint4 packed) const {
        float x[UNIT];
        unpack_unit(packed, x);
        normalise<SILU>(x, scale, shift);
        return pack_unit(x);
    }
};
