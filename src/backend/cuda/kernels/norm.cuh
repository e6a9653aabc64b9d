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

/// The norm of 8 neighbouring channels, for a thread that stays with them.
struct Norm8 {
    float scale[8], shift[8];

    __device__ __forceinline__ void load(const Norm& norm, i64 slot, int channel) {
        const float2* statistics = norm.statistics + slot * norm.stride;
        int group = channel / norm.group_channels, left = norm.group_channels - channel % norm.group_channels;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
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

    /// In stages of 8, so that the latencies of the special functions overlap even when a few warps are all there are.
    template <bool SILU>
    __device__ __forceinline__ uint4 apply(uint4 packed) const {
        const u32 pair[4] = {packed.x, packed.y, packed.z, packed.w};
        float x[8], s[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = unpack2(pair[i]);
            x[2 * i] = v.x * scale[2 * i] + shift[2 * i];
            x[2 * i + 1] = v.y * scale[2 * i + 1] + shift[2 * i + 1];
        }
        if (SILU) {
#pragma unroll
            for (int i = 0; i < 8; ++i) s[i] = exp2_volatile(x[i] * -1.4426950408889634f);
#pragma unroll
            for (int i = 0; i < 8; ++i) s[i] = reciprocal_volatile(1.0f + s[i]);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] *= s[i];
        }
        return make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
    }
};
