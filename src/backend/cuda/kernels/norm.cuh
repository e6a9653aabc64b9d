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
            shift[i] = __ldg(norm.beta + channel + i) - s.x * scale[i];
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

    /// In stages of a unit, so that the latencies of the special functions overlap even when a few warps are all there are.
    template <bool SILU>
    __device__ __forceinline__ uint4 apply(uint4 packed) const {
        float x[UNIT], s[UNIT];
        unpack_unit(packed, x);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) x[i] = x[i] * scale[i] + shift[i];
        if (SILU) {
#pragma unroll
            for (int i = 0; i < UNIT; ++i) s[i] = exp2_volatile(x[i] * -1.4426950408889634f);
#pragma unroll
            for (int i = 0; i < UNIT; ++i) s[i] = reciprocal_volatile(1.0f + s[i]);
#pragma unroll
            for (int i = 0; i < UNIT; ++i) x[i] *= s[i];
        }
        return pack_unit(x);
    }
};
