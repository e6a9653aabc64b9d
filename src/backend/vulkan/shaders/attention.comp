#version 460
// softmax(q k^T) v over the pixels of a frame, keys in their order. A workgroup has 32 queries and 512 channels of the
// result; eight threads share a query.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "attention_params.glsl"

const int THREADS = 256, QUERIES = 32, KEYS = 32, LANES = THREADS / QUERIES, CHUNK = 32;
const int OWN_KEYS = KEYS / LANES, OWN_QUADS = 16, CHANNELS = OWN_QUADS * LANES * 4;

layout(local_size_x = THREADS) in;
layout(push_constant, scalar) uniform Push { AttentionParams p; };

shared float queries[QUERIES][CHUNK + 1];
shared float keys[KEYS][CHUNK + 1];
shared float scores[QUERIES][KEYS + 1];

/// Four channels of a pixel; zeros beyond the frame and beyond the channels.
vec4 channels_of(uint64_t frame, uint pixel, uint part, uint channel) {
    if (pixel >= p.pixels || channel >= p.channels) return vec4(0.0);
    return load4(frame + (uint64_t(pixel) * p.input_channels + part * p.channels + channel) * ELEMENT_BYTES);
}

/// The scores of this thread's keys.
void score(uint64_t frame, uint first_query, uint first_key) {
    const uint row = gl_LocalInvocationIndex / LANES, lane = gl_LocalInvocationIndex % LANES;
    float sums[OWN_KEYS];
    [[unroll]] for (int i = 0; i < OWN_KEYS; ++i) sums[i] = 0.0;
    for (uint chunk = 0; chunk < p.channels; chunk += CHUNK) {
        barrier();
        const vec4 q = channels_of(frame, first_query + row, 0, chunk + lane * 4);
        const vec4 k = channels_of(frame, first_key + row, 1, chunk + lane * 4);
        [[unroll]] for (int c = 0; c < 4; ++c) {
            queries[row][lane * 4 + c] = q[c];
            keys[row][lane * 4 + c] = k[c];
        }
        barrier();
        for (int c = 0; c < CHUNK; ++c)
            [[unroll]] for (int i = 0; i < OWN_KEYS; ++i)
                sums[i] = fma(queries[row][c], keys[lane * OWN_KEYS + i][c], sums[i]);
    }
    [[unroll]] for (int i = 0; i < OWN_KEYS; ++i) scores[row][lane * OWN_KEYS + i] = sums[i];
    barrier();
}

void main() {
    const uint row = gl_LocalInvocationIndex / LANES, lane = gl_LocalInvocationIndex % LANES;
    const uint first_query = p.first_query + gl_WorkGroupID.x * QUERIES, first_channel = gl_WorkGroupID.z * CHANNELS;
    const uint64_t frame = p.from[gl_WorkGroupID.y];
    vec4 result[OWN_QUADS];
    [[unroll]] for (int i = 0; i < OWN_QUADS; ++i) result[i] = vec4(0.0);
    float most = uintBitsToFloat(0xff800000u), total = 0.0;
    for (uint first_key = 0; first_key < p.pixels; first_key += KEYS) {
        score(frame, first_query, first_key);
        const int count = int(min(uint(KEYS), p.pixels - first_key));
        float new_most = most;
        for (int key = 0; key < count; ++key) new_most = max(new_most, scores[row][key]);
        const float factor = exponential(most - new_most);
        total *= factor;
        [[unroll]] for (int i = 0; i < OWN_QUADS; ++i) result[i] *= factor;
        for (int key = 0; key < count; ++key) {
            const float weight = exponential(scores[row][key] - new_most);
            total += weight;
            [[unroll]] for (int i = 0; i < OWN_QUADS; ++i) {
                const uint channel = first_channel + i * LANES * 4 + lane * 4;
                if (channel < p.channels) result[i] += weight * channels_of(frame, first_key + key, 2, channel);
            }
        }
        most = new_most;
        barrier();
    }
    if (first_query + row >= p.pixels) return;
    [[unroll]] for (int i = 0; i < OWN_QUADS; ++i) {
        const uint channel = first_channel + i * LANES * 4 + lane * 4;
        if (channel >= p.out_channels) continue;
        const uint64_t at = (uint64_t(first_query + row) * p.out_channels + channel) * ELEMENT_BYTES;
        store4(p.to[gl_WorkGroupID.y] + at, result[i] / total);
    }
}
