#version 460
// Adds to each frame a smaller one, whose channels are repeated in pixels and frames. A thread for each element.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

struct AddedFrame {
    uint64_t x, addend, target;  // the target may be `x`
    uint part;
    uint unused;
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer AddParams {
    int height, width;
    int channels;        // that have values
    int out_channels;    // of a pixel in memory
    int addend_width;
    int addend_channels;  // of a pixel in memory
    int side, parts, repeats;
    int unused;
    AddedFrame frame[MAX_FRAMES];
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { AddParams p; };

void main() {
    const AddedFrame frame = p.frame[gl_WorkGroupID.y];
    const uint64_t count = uint64_t(p.height) * p.width * p.out_channels, step = uint64_t(gl_NumWorkGroups.x) * 256;
    for (uint64_t index = gl_GlobalInvocationID.x; index < count; index += step) {
        const uint64_t pixel = index / p.out_channels;
        const int channel = int(index % p.out_channels), y = int(pixel / p.width), x = int(pixel % p.width);
        precise float sum = load1(frame.x + index * ELEMENT_BYTES);
        if (channel < p.channels) {
            const int repeated = ((channel * p.parts + int(frame.part)) * p.side + y % p.side) * p.side + x % p.side;
            const uint64_t at = uint64_t(y / p.side) * p.addend_width + x / p.side;
            sum = sum + load1(frame.addend + (at * p.addend_channels + repeated / p.repeats) * ELEMENT_BYTES);
        }
        store1(frame.target + index * ELEMENT_BYTES, sum);
    }
}
