#version 460
// Rows of frames, copied to another place on the device, in units of 8 bytes. Sources and destinations do not overlap.
#extension GL_GOOGLE_include_directive : require
#define VVAE_FP32
#include "common.glsl"

struct Copy {
    uint64_t from, to;
    uint64_t units;
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer CopyParams {
    uint64_t row_units;
    uint64_t from_pitch, to_pitch;  // in bytes
    Copy copy[MAX_FRAMES];
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { CopyParams p; };

void main() {
    const Copy own = p.copy[gl_WorkGroupID.y];
    const uint64_t step = uint64_t(gl_NumWorkGroups.x) * 256;
    for (uint64_t unit = gl_GlobalInvocationID.x; unit < own.units; unit += step) {
        const uint64_t row = unit / p.row_units, column = unit % p.row_units * 8;
        Word2(own.to + row * p.to_pitch + column).value = Word2(own.from + row * p.from_pitch + column).value;
    }
}
