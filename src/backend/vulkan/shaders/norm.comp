#version 460
// GroupNorm by known statistics, and SiLU. A thread normalises the same four channels of many pixels.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#include "norm_params.glsl"

layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { NormParams p; };

void main() {
    const NormFrame frame = p.frame[gl_WorkGroupID.y];
    const uint index = gl_GlobalInvocationID.x, quads = uint(p.channels) / 4;
    // A launch has a multiple of a pixel's threads.
    const uint step = gl_NumWorkGroups.x * 256 / quads, channel = index % quads * 4;
    precise vec4 scale, shift;
    [[unroll]] for (uint c = 0; c < 4; ++c) {
        // Padding channels have gamma = beta = 0, so any group will do.
        const uint group = min((channel + c) / p.group_channels, p.groups - 1);
        const vec2 statistics = Float2(frame.statistics + uint64_t(group) * 8).value;
        scale[c] = statistics.y * Float(p.gamma + uint64_t(channel + c) * 4).value;
        shift[c] = Float(p.beta + uint64_t(channel + c) * 4).value - statistics.x * scale[c];
    }
    for (uint64_t pixel = index / quads; pixel < p.pixels; pixel += step) {
        const uint64_t at = (pixel * p.channels + channel) * ELEMENT_BYTES;
        vec4 x = load4(frame.from + at) * scale + shift;
        if (p.silu != 0) x = vec4(silu(x.x), silu(x.y), silu(x.z), silu(x.w));
        store4(frame.to + at, x);
    }
}
