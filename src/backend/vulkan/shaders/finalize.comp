#version 460
// Mean and reciprocal deviation of each group, from the records of a convolution's tiles. A workgroup for each group and
// frame; the frame's shape fixes the order of the sums.
#extension GL_GOOGLE_include_directive : require
#define VVAE_FP32
#include "common.glsl"

const int THREADS = 256, RECORD_ROWS = 8, RECORD_COLUMNS = 16;

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer FinalizeParams {
    uint64_t records;  // [frame][phase][row][column][channel]: mean, sum of squared deviations
    int channels;      // of a record
    int group_channels;
    int phases, height, width;  // of the tile grid
    float epsilon;
    uint64_t statistics[MAX_FRAMES];
};
layout(local_size_x = THREADS) in;
layout(push_constant, scalar) uniform Push { FinalizeParams p; };

shared float scratch[THREADS];

float sum_of_all(float value) {
    barrier();
    scratch[gl_LocalInvocationIndex] = value;
    for (uint half_count = THREADS / 2; half_count > 0; half_count /= 2) {
        barrier();
        if (gl_LocalInvocationIndex < half_count) scratch[gl_LocalInvocationIndex] += scratch[gl_LocalInvocationIndex + half_count];
    }
    barrier();
    return scratch[0];
}

void main() {
    const int group = int(gl_WorkGroupID.x), frame = int(gl_WorkGroupID.y);
    const int rows = (p.height + RECORD_ROWS - 1) / RECORD_ROWS, columns = (p.width + RECORD_COLUMNS - 1) / RECORD_COLUMNS;
    const int count = p.phases * rows * columns;
    const uint64_t records = p.records + uint64_t(int64_t(frame) * count * p.channels + group * p.group_channels) * 8;
    const float pivot = Float2(records).value.x;
    // A thread takes moments about one of the means, so little cancels.
    float elements = 0.0, total = 0.0, squares = 0.0;
    for (int record = int(gl_LocalInvocationIndex); record < count; record += THREADS) {
        const int column = record % columns, row = record / columns % rows;
        const int pixels = min(RECORD_ROWS, p.height - RECORD_ROWS * row) * min(RECORD_COLUMNS, p.width - RECORD_COLUMNS * column);
        for (int channel = 0; channel < p.group_channels; ++channel) {
            const vec2 part = Float2(records + uint64_t(int64_t(record) * p.channels + channel) * 8).value;
            const float difference = part.x - pivot;
            elements += float(pixels);
            total += difference * float(pixels);
            squares += part.y + difference * difference * float(pixels);
        }
    }
    const float all = float(p.phases) * float(p.height) * float(p.width) * float(p.group_channels);
    const float mean = pivot + sum_of_all(total) / all;
    const float offset = elements > 0.0 ? total / elements : 0.0, distance = pivot + offset - mean;
    const float variance = sum_of_all(max(squares - total * offset, 0.0) + elements * distance * distance) / all;
    if (gl_LocalInvocationIndex == 0)
        Float2(p.statistics[frame] + uint64_t(group) * 8).value = vec2(mean, 1.0 / sqrt(variance + p.epsilon));
}
