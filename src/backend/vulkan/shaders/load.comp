#version 460
// A frame of a host tensor to activations. A thread for each pixel.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tensor.glsl"

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer LoadParams {
    Strided from;
    uint64_t into;
    uint64_t nonfinite;  // a word that is set if a value is not finite
    int height, width;   // of the activations
    int channels;        // of a pixel in memory; those beyond the tensor's are zero
    float mul, add;
    int patch_side;  // rows and columns of the tensor that are one pixel; channels are [channel][column][row]
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { LoadParams p; };

void main() {
    const uint x = gl_GlobalInvocationID.x, y = gl_WorkGroupID.y;
    if (x >= p.width) return;
    const int patch_pixels = p.patch_side * p.patch_side;
    const uint64_t into = p.into + (uint64_t(y) * p.width + x) * p.channels * ELEMENT_BYTES;
    bool finite = true;
    for (int first = 0; first < p.channels; first += 4) {
        vec4 value = vec4(0.0);
        [[unroll]] for (int i = 0; i < 4; ++i) {
            const int channel = (first + i) / patch_pixels;
            if (channel >= p.from.channels) continue;
            const int row = min(int(y) * p.patch_side + (first + i) % p.patch_side, p.from.height - 1);
            const int within = (first + i) / p.patch_side % p.patch_side;
            const int column = min(int(x) * p.patch_side + within, p.from.width - 1);
            precise float mapped = fma(read_element(p.from, channel, row, column), p.mul, p.add);
            value[i] = mapped;
            finite = finite && is_finite(mapped);
        }
        store4(into + uint64_t(first) * ELEMENT_BYTES, value);
    }
    if (!finite) Word(p.nonfinite).value = 1;
}
