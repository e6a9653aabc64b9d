#version 460
// A frame of a host tensor to activations. A thread for each pixel.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tensor.glsl"

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer LoadParams {
    Strided from;
    uint64_t into;
    uint64_t nonfinite;  // a word that is set if a value is not finite
    uint64_t maps;       // of each channel of the tensor, factor and addend in place of `mul` and `add`; or 0
    int height, width;   // of the activations
    int channels;        // of a pixel in memory
    int own_channels;    // of the activations; those that the tensor lacks are 1, those beyond are 0
    float mul, add;
    int patch_side;  // rows and columns of the tensor that are one pixel; channels are [channel][column][row]
    // With maps: rows and columns of activations that are one pixel of the tensor, whose channels are
    // [channel][row][column]; and where in the tensor's first pixel the activations begin.
    int side, top, left;
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { LoadParams p; };

/// A channel of activations, whose tensor has it in another place and in a scale of its own.
float mapped(int own, int y, int x) {
    const int row = min(p.top + y, p.from.height * p.side - 1), column = min(p.left + x, p.from.width * p.side - 1);
    const int channel = (own * p.side + row % p.side) * p.side + column % p.side;
    if (own >= p.own_channels) return 0.0;
    const vec2 map = Float2(p.maps + uint64_t(channel) * 8).value;
    precise float value = fma(read_element(p.from, channel, row / p.side, column / p.side), map.x, map.y);
    return value;
}

float unmapped(int own, int y, int x) {
    const int channel = own / (p.patch_side * p.patch_side);
    if (channel >= p.from.channels) return own < p.own_channels ? 1.0 : 0.0;
    const int row = min(y * p.patch_side + own % p.patch_side, p.from.height - 1);
    const int column = min(x * p.patch_side + own / p.patch_side % p.patch_side, p.from.width - 1);
    precise float value = fma(read_element(p.from, channel, row, column), p.mul, p.add);
    return value;
}

void main() {
    const int x = int(gl_GlobalInvocationID.x), y = int(gl_WorkGroupID.y);
    if (x >= p.width) return;
    const uint64_t into = p.into + (uint64_t(y) * p.width + x) * p.channels * ELEMENT_BYTES;
    bool finite = true;
    for (int first = 0; first < p.channels; first += 4) {
        vec4 value;
        [[unroll]] for (int i = 0; i < 4; ++i) {
            value[i] = p.maps != 0 ? mapped(first + i, y, x) : unmapped(first + i, y, x);
            finite = finite && is_finite(value[i]);
        }
        store4(into + uint64_t(first) * ELEMENT_BYTES, value);
    }
    if (!finite) Word(p.nonfinite).value = 1;
}
