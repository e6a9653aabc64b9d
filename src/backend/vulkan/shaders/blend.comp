#version 460
// Adds a tile to its whole frame. A thread for each pixel.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer BlendParams {
    uint64_t from, into;
    uint64_t rows, columns;  // fades of the tile
    int height, width;       // of the tile
    int into_height, into_width;
    int top, left;
    int channels;  // of a pixel in memory
    int clear;     // for the first tile of a frame
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { BlendParams p; };

void main() {
    // With `clear`, every pixel of the frame is written; else the tile's.
    const int x = int(gl_GlobalInvocationID.x) + (p.clear != 0 ? 0 : p.left);
    const int y = int(gl_WorkGroupID.y) + (p.clear != 0 ? 0 : p.top);
    const int row = y - p.top, column = x - p.left;
    const bool covered = row >= 0 && row < p.height && column >= 0 && column < p.width;
    if (x >= p.into_width || (p.clear == 0 && !covered)) return;
    precise float weight = 0.0;
    if (covered) weight = Float(p.rows + uint64_t(row) * 4).value * Float(p.columns + uint64_t(column) * 4).value;
    const uint64_t into = p.into + (uint64_t(y) * p.into_width + x) * p.channels * ELEMENT_BYTES;
    const uint64_t from = p.from + (uint64_t(row) * p.width + column) * p.channels * ELEMENT_BYTES;
    for (int c = 0; c < p.channels; c += 4) {
        const uint64_t at = uint64_t(c) * ELEMENT_BYTES;
        precise vec4 sum = p.clear != 0 ? vec4(0.0) : load4(into + at);
        if (covered) sum = fma(load4(from + at), vec4(weight), sum);
        store4(into + at, sum);
    }
}
