#version 460
// The norm of a pixel by the length of its channels, and SiLU. Eight threads share a pixel. Each adds up the squares of
// its fours of channels; then all are added up in their order. So the number of channels fixes the order.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

#include "norm_params.glsl"

const uint THREADS = 256, LANES = 8, GROUP_PIXELS = THREADS / LANES;
layout(local_size_x = THREADS) in;
layout(push_constant, scalar) uniform Push { NormParams p; };

shared float squares[THREADS];

void main() {
    const NormFrame frame = p.frame[gl_WorkGroupID.y];
    const uint lane = gl_LocalInvocationIndex % LANES, own = gl_LocalInvocationIndex / LANES;
    const uint64_t step = uint64_t(gl_NumWorkGroups.x) * GROUP_PIXELS;
    for (uint64_t first = uint64_t(gl_WorkGroupID.x) * GROUP_PIXELS; first < p.pixels; first += step) {
        const uint64_t pixel = first + own;
        const bool inside = pixel < p.pixels;
        const uint64_t at = pixel * p.channels * ELEMENT_BYTES;
        precise float sum = 0.0;
        for (uint channel = lane * 4; inside && channel < p.channels; channel += LANES * 4) {
            const vec4 x = load4(frame.from + at + uint64_t(channel) * ELEMENT_BYTES);
            [[unroll]] for (int c = 0; c < 4; ++c) sum = sum + x[c] * x[c];
        }
        barrier();
        squares[gl_LocalInvocationIndex] = sum;
        barrier();
        precise float all = 0.0;
        [[unroll]] for (uint i = 0; i < LANES; ++i) all = all + squares[own * LANES + i];
        const float size = sqrt(all);
        const float inverse = 1.0 / (size < 1e-12 ? 1e-12 : size);  // NaN stays NaN
        for (uint channel = lane * 4; inside && channel < p.channels; channel += LANES * 4) {
            const uint64_t unit = at + uint64_t(channel) * ELEMENT_BYTES;
            const vec4 gamma = Float4(p.gamma + uint64_t(channel) * 4).value;
            vec4 x = load4(frame.from + unit) * (inverse * gamma);
            if (p.silu != 0) x = vec4(silu(x.x), silu(x.y), silu(x.z), silu(x.w));
            store4(frame.to + unit, x);
        }
    }
}
