#version 460
// Means of 2 x 2 pixels. Channel c of the input becomes channel c * parts + part of the output. A thread for each element
// of the output.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

struct PooledFrame {
    uint64_t from, into;
    uint part;
    uint clear;  // whether the channels of all other parts become 0
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer PoolParams {
    int height, width;  // of the output
    int input_width;
    int input_channels, out_channels;  // of a pixel in memory
    int channels;                      // of the input that have values
    int parts;
    int unused;
    PooledFrame frame[MAX_FRAMES];
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { PoolParams p; };

void main() {
    const PooledFrame frame = p.frame[gl_WorkGroupID.y];
    const uint64_t count = uint64_t(p.height) * p.width * p.out_channels, step = uint64_t(gl_NumWorkGroups.x) * 256;
    for (uint64_t index = gl_GlobalInvocationID.x; index < count; index += step) {
        const uint64_t pixel = index / p.out_channels;
        const int out_channel = int(index % p.out_channels), channel = out_channel / p.parts;
        const bool is_own = out_channel % p.parts == frame.part && channel < p.channels;
        if (!is_own && frame.clear == 0) continue;
        precise float mean = 0.0;
        if (is_own) {
            const uint64_t first = pixel / p.width * 2 * p.input_width + pixel % p.width * 2;
            const uint64_t from = frame.from + (first * p.input_channels + channel) * ELEMENT_BYTES;
            const uint64_t column = uint64_t(p.input_channels) * ELEMENT_BYTES, row = column * p.input_width;
            mean = load1(from) + load1(from + column);
            mean = mean + load1(from + row);
            mean = mean + load1(from + row + column);
            mean = mean * 0.25;
        }
        store1(frame.into + index * ELEMENT_BYTES, mean);
    }
}
