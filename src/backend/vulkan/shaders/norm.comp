#version 460
// GroupNorm by known statistics, and SiLU. A thread normalises the same eight channels of many pixels.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#include "norm_params.glsl"

layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { NormParams p; };

/// Eight channels of a pixel. Pixels of fewer have four, and then zeros.
struct Eight {
    vec4 low, high;
};

bool has_eight() { return p.channels >= 8; }

Eight load8(uint64_t address) {
    Eight x = Eight(vec4(0.0), vec4(0.0));
    if (!has_eight()) {
        x.low = load4(address);
        return x;
    }
#if defined(VVAE_FP32)
    return Eight(load4(address), load4(address + 16));
#else
    const uvec4 pairs = Word4(address).value;
    return Eight(vec4(unpack(pairs.x), unpack(pairs.y)), vec4(unpack(pairs.z), unpack(pairs.w)));
#endif
}

void store8(uint64_t address, Eight x) {
    if (!has_eight()) {
        store4(address, x.low);
        return;
    }
#if defined(VVAE_FP32)
    store4(address, x.low);
    store4(address + 16, x.high);
#else
    Word4(address).value = uvec4(pack(x.low.xy), pack(x.low.zw), pack(x.high.xy), pack(x.high.zw));
#endif
}

vec4 silu4(vec4 x) { return vec4(silu(x.x), silu(x.y), silu(x.z), silu(x.w)); }

void main() {
    const NormFrame frame = p.frame[gl_WorkGroupID.y];
    const uint index = gl_GlobalInvocationID.x, units = max(p.channels / 8, 1u);
    // A launch has a multiple of a pixel's threads.
    const uint step = gl_NumWorkGroups.x * 256 / units, channel = index % units * 8;
    precise vec4 scale[2], shift[2];
    [[unroll]] for (uint c = 0; c < 8; ++c) {
        // Padding channels have gamma = beta = 0, so any group will do.
        const uint own = min(channel + c, p.channels - 1), group = min(own / p.group_channels, p.groups - 1);
        const vec2 statistics = Float2(frame.statistics + uint64_t(group) * 8).value;
        scale[c / 4][c % 4] = statistics.y * Float(p.gamma + uint64_t(own) * 4).value;
        shift[c / 4][c % 4] = Float(p.beta + uint64_t(own) * 4).value - statistics.x * scale[c / 4][c % 4];
    }
    const uint64_t pixel_bytes = uint64_t(p.channels) * ELEMENT_BYTES, own_bytes = uint64_t(channel) * ELEMENT_BYTES;
    for (uint64_t pixel = index / units; pixel < p.pixels; pixel += step) {
        const uint64_t at = pixel * pixel_bytes + own_bytes;
        Eight x = load8(frame.from + at);
        x.low = x.low * scale[0] + shift[0];
        x.high = x.high * scale[1] + shift[1];
        if (p.silu != 0) x = Eight(silu4(x.low), silu4(x.high));
        store8(frame.to + at, x);
    }
}
