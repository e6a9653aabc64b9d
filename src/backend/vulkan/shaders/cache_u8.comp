#version 460
// Rows of causal caches in 8 bits. What is cached follows SiLU: nothing is below -0.2785, and most is near it. So a value
// is stored as the square root of its distance from there, in steps of a scale. A block of channels of a pixel shares it.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

const float LEAST = -0.2786;
const float MOST_SCALE = 65504.0;  // of f16
const float STEPS = 255.0;
const uint STORE = 0, RESTORE = 1;  // else to 8 bits and back

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer CacheParams {
    uint copy;
    uint rows, columns;
    uint channels;  // of a pixel
    uint block;     // channels that share a scale: a multiple of 4, at most 64
    uint unused;
    uint64_t from_pitch, to_pitch;  // in bytes
    uint64_t from[MAX_FRAMES];
    uint64_t to[MAX_FRAMES];
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { CacheParams p; };

/// Rounded up, so that the greatest value keeps its place. NaN where a value is no number or infinite.
uint scale_of(uint64_t from) {
    float most = 1e-8;
    bool finite = true;
    for (uint c = 0; c < p.block; c += 4) {
        precise vec4 x = load4(from + uint64_t(c) * ELEMENT_BYTES) - LEAST;
        [[unroll]] for (int i = 0; i < 4; ++i) {
            finite = finite && is_finite(x[i]);
            most = max(most, x[i]);
        }
    }
    precise float scale = min(sqrt(most) / STEPS, MOST_SCALE);
    const uint near = half_of(scale);
    return finite ? near + (from_half(near) < scale ? 1u : 0u) : 0x7e00u;
}

uint code_of(float x, float scale) {
    precise float distance = max(x - LEAST, 0.0);
    precise float steps = sqrt(distance) / scale;
    return uint(min(roundEven(steps), STEPS));
}

float value_of(uint code, float scale) {
    precise float root = float(code) * scale;
    precise float square = root * root;
    precise float value = square + LEAST;
    return value;
}

void main() {
    const uint blocks = p.channels / p.block, index = gl_GlobalInvocationID.x;
    if (index >= p.rows * p.columns * blocks) return;
    const uint row = index / (p.columns * blocks), place = index % (p.columns * blocks);
    const uint64_t from_row = p.from[gl_WorkGroupID.y] + row * p.from_pitch;
    const uint64_t to_row = p.to[gl_WorkGroupID.y] + row * p.to_pitch;
    // A row's scales follow its pixels.
    const uint64_t scales = uint64_t(p.columns) * p.channels + uint64_t(place) * 2;
    const uint64_t first = uint64_t(place) * p.block;
    const uint packed = p.copy == RESTORE ? uint(Short(from_row + scales).value) : scale_of(from_row + first * ELEMENT_BYTES);
    const float scale = from_half(packed);
    if (p.copy == STORE) Short(to_row + scales).value = uint16_t(packed);
    for (uint c = 0; c < p.block; c += 4) {
        uint codes = 0;
        if (p.copy == RESTORE) {
            codes = Word(from_row + first + c).value;
        } else {
            const vec4 x = load4(from_row + (first + c) * ELEMENT_BYTES);
            [[unroll]] for (int i = 0; i < 4; ++i) codes |= code_of(x[i], scale) << (8 * i);
        }
        if (p.copy == STORE) {
            Word(to_row + first + c).value = codes;
            continue;
        }
        vec4 x;
        [[unroll]] for (int i = 0; i < 4; ++i) x[i] = value_of(codes >> (8 * i) & 0xffu, scale);
        store4(to_row + (first + c) * ELEMENT_BYTES, x);
    }
}
