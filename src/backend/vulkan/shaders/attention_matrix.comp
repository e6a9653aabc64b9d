#version 460
// softmax(q k^T) v by the device's matrix unit: f16 products, f32 sums. A workgroup has 64 queries and 512 channels of the
// result. It goes through the keys twice: the first time for the greatest score of each query, so that sums need no
// correction. Channels are a multiple of 64.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "common.glsl"
#include "attention_params.glsl"

layout(constant_id = 0) const uint M = 16;
layout(constant_id = 1) const uint N = 16;
layout(constant_id = 2) const uint K = 16;
layout(constant_id = 3) const uint SUBGROUPS = 8;

const uint THREADS = 256, QUERIES = 64, KEYS = 64, CHANNELS = 512;
const uint CHUNK = 64;       // channels of queries and keys at a time
const uint VALUE_KEYS = 16;  // keys whose values are multiplied at a time
layout(local_size_x = THREADS) in;
layout(push_constant, scalar) uniform Push { AttentionParams p; };

// Shared memory comes in units of 16 bytes: 8 channels, or 4 sums. Rows have one more than they need, against bank conflicts.
const uint CHUNK_UNITS = CHUNK / 8, CHUNK_PITCH = CHUNK_UNITS + 1;
const uint VALUE_UNITS = CHANNELS / 8, VALUE_PITCH = VALUE_UNITS + 1;
const uint WEIGHT_PITCH = KEYS / 8 + 1, SCORE_PITCH = KEYS / 4 + 1;
// Queries and keys, then scores, then values lie in one place.
const uint SCORES = 0;
const uint WEIGHTS = max(max((QUERIES + KEYS) * CHUNK_PITCH, VALUE_KEYS * VALUE_PITCH), QUERIES * SCORE_PITCH);
shared uvec4 memory[WEIGHTS + QUERIES * WEIGHT_PITCH];

// Tiles of scores of a subgroup, side by side; and of the result.
const uint SCORE_COLUMNS = KEYS / N, SCORE_TILES = QUERIES / M * SCORE_COLUMNS / SUBGROUPS;
const uint ROWS = QUERIES / M, COLUMNS = CHANNELS / N / SUBGROUPS;

const uint CHUNK_LOADS = (QUERIES + KEYS) * CHUNK_UNITS / THREADS, VALUE_LOADS = VALUE_KEYS * VALUE_UNITS / THREADS;

// Parameters that loops read. The compiler would load them in every round.
uint pixels, channels, pixel_channels;

/// Eight channels of a pixel. Zeros beyond the frame and beyond the channels.
uvec4 channels_of(uint64_t frame, uint pixel, uint part, uint channel) {
    if (pixel >= pixels || channel >= channels) return uvec4(0);
    return ReadOnly4(frame + (uint64_t(pixel) * pixel_channels + part * channels + channel) * 2).value;
}

void fetch_chunk(uint64_t frame, uint first_query, uint first_key, uint channel, out uvec4 next[CHUNK_LOADS]) {
    [[unroll]] for (uint i = 0; i < CHUNK_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS, row = index / CHUNK_UNITS;
        const bool is_query = row < QUERIES;
        const uint pixel = is_query ? first_query + row : first_key + row - QUERIES;
        next[i] = channels_of(frame, pixel, is_query ? 0 : 1, channel + index % CHUNK_UNITS * 8);
    }
}

void fetch_values(uint64_t frame, uint first_key, uint first_channel, out uvec4 values[VALUE_LOADS]) {
    [[unroll]] for (uint i = 0; i < VALUE_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS;
        values[i] = channels_of(frame, first_key + index / VALUE_UNITS, 2, first_channel + index % VALUE_UNITS * 8);
    }
}

void put_chunk(uvec4 chunk[CHUNK_LOADS]) {
    [[unroll]] for (uint i = 0; i < CHUNK_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS;
        memory[index / CHUNK_UNITS * CHUNK_PITCH + index % CHUNK_UNITS] = chunk[i];
    }
}

#define Scores coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>

/// Adds the products of a chunk to the scores of this subgroup.
void score_chunk(uint row, uint column, inout Scores scores[SCORE_TILES]) {
    [[unroll]] for (uint k = 0; k < CHUNK; k += K) {
        coopmat<float16_t, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a;
        coopMatLoad(a, memory, row * CHUNK_PITCH + k / 8, CHUNK_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint i = 0; i < SCORE_TILES; ++i) {
            coopmat<float16_t, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
            const uint key = (QUERIES + column + i * N) * CHUNK_PITCH + k / 8;
            coopMatLoad(b, memory, key, CHUNK_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            scores[i] = coopMatMulAdd(a, b, scores[i]);
        }
    }
}

void put_values(uvec4 values[VALUE_LOADS]) {
    [[unroll]] for (uint i = 0; i < VALUE_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS;
        memory[index / VALUE_UNITS * VALUE_PITCH + index % VALUE_UNITS] = values[i];
    }
}

/// The scores of all queries and of some keys, in shared memory.
void score(uint64_t frame, uint first_query, uint first_key) {
    Scores scores[SCORE_TILES];
    [[unroll]] for (uint i = 0; i < SCORE_TILES; ++i)
        scores[i] = Scores(0.0);
    const uint tile = gl_SubgroupID * SCORE_TILES, row = tile / SCORE_COLUMNS * M, column = tile % SCORE_COLUMNS * N;
    // Two chunks ahead: one is not computed as long as another takes to come.
    uvec4 even[CHUNK_LOADS], odd[CHUNK_LOADS];
    fetch_chunk(frame, first_query, first_key, 0, even);
    fetch_chunk(frame, first_query, first_key, CHUNK, odd);
    barrier();
    put_chunk(even);
    [[dont_unroll]] for (uint chunk = 0; chunk < channels; chunk += 2 * CHUNK) {
        barrier();
        fetch_chunk(frame, first_query, first_key, chunk + 2 * CHUNK, even);
        score_chunk(row, column, scores);
        if (chunk + CHUNK >= channels) break;
        barrier();
        put_chunk(odd);
        barrier();
        fetch_chunk(frame, first_query, first_key, chunk + 3 * CHUNK, odd);
        score_chunk(row, column, scores);
        barrier();
        put_chunk(even);
    }
    barrier();
    [[unroll]] for (uint i = 0; i < SCORE_TILES; ++i) {
        const uint to = SCORES + row * SCORE_PITCH + (column + i * N) / 4;
        coopMatStore(scores[i], memory, to, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    }
    barrier();
}

// Four threads share a query; each has 16 of the keys.
const uint OWN_KEYS = KEYS / 4;
uint own_row() { return gl_LocalInvocationIndex / 4; }
uint own_lane() { return gl_LocalInvocationIndex % 4; }

float own_sum(uint i) {
    return uintBitsToFloat(memory[SCORES + own_row() * SCORE_PITCH + own_lane() * OWN_KEYS / 4 + i / 4][i % 4]);
}

/// What the four threads of a query have, for all of them.
vec4 of_query(float own) {
    barrier();
    memory[SCORES + own_row() * SCORE_PITCH][own_lane()] = floatBitsToUint(own);
    barrier();
    const vec4 all = uintBitsToFloat(memory[SCORES + own_row() * SCORE_PITCH]);
    barrier();
    return all;
}

float greatest(uint count, float most) {
    [[unroll]] for (uint i = 0; i < OWN_KEYS; ++i)
        most = max(most, own_lane() * OWN_KEYS + i < count ? own_sum(i) : most);
    return most;
}

/// Puts this thread's weights into shared memory; their sum.
float weigh(uint count, float most) {
    uint pairs[OWN_KEYS / 2];
    float total = 0.0;
    [[unroll]] for (uint i = 0; i < OWN_KEYS; i += 2) {
        vec2 weight = vec2(exponential(own_sum(i) - most), exponential(own_sum(i + 1) - most));
        weight.x = own_lane() * OWN_KEYS + i < count ? weight.x : 0.0;
        weight.y = own_lane() * OWN_KEYS + i + 1 < count ? weight.y : 0.0;
        pairs[i / 2] = pack(weight);
        // As they are multiplied.
        weight = unpack(pairs[i / 2]);
        total += weight.x + weight.y;
    }
    [[unroll]] for (uint i = 0; i < OWN_KEYS / 8; ++i) {
        const uvec4 eight = uvec4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
        memory[WEIGHTS + own_row() * WEIGHT_PITCH + own_lane() * OWN_KEYS / 8 + i] = eight;
    }
    return total;
}

void main() {
    pixels = p.pixels;
    channels = p.channels;
    pixel_channels = p.input_channels;
    const uint first_query = p.first_query + gl_WorkGroupID.x * QUERIES, first_channel = gl_WorkGroupID.z * CHANNELS;
    const uint64_t frame = p.from[gl_WorkGroupID.y];
    coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> result[ROWS * COLUMNS];
    [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i)
        result[i] = coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>(0.0);
    const uint column = gl_SubgroupID * COLUMNS * N;
    float most = uintBitsToFloat(0xff800000u), total = 0.0;
    [[dont_unroll]] for (uint pass = 0; pass < 2; ++pass) {
        [[dont_unroll]] for (uint first_key = 0; first_key < pixels; first_key += KEYS) {
            score(frame, first_query, first_key);
            const uint count = min(KEYS, pixels - first_key);
            if (pass == 0) {
                most = greatest(count, most);
                continue;
            }
            uvec4 values[VALUE_LOADS];
            fetch_values(frame, first_key, first_channel, values);
            total += weigh(count, most);
            barrier();
            put_values(values);
            [[dont_unroll]] for (uint key = 0; key < KEYS; key += VALUE_KEYS) {
                barrier();
                fetch_values(frame, first_key + key + VALUE_KEYS, first_channel, values);
                [[unroll]] for (uint k = 0; k < VALUE_KEYS; k += K) {
                    coopmat<float16_t, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a[ROWS];
                    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
                        const uint from = WEIGHTS + r * M * WEIGHT_PITCH + (key + k) / 8;
                        coopMatLoad(a[r], memory, from, WEIGHT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                    }
                    [[unroll]] for (uint c = 0; c < COLUMNS; ++c) {
                        coopmat<float16_t, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
                        const uint from = k * VALUE_PITCH + (column + c * N) / 8;
                        coopMatLoad(b, memory, from, VALUE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                        [[unroll]] for (uint r = 0; r < ROWS; ++r)
                            result[r * COLUMNS + c] = coopMatMulAdd(a[r], b, result[r * COLUMNS + c]);
                    }
                }
                barrier();
                // Behind the last ones come the next block's, which nobody reads.
                put_values(values);
            }
        }
        if (pass == 0) {
            const vec4 all = of_query(most);
            most = max(max(all.x, all.y), max(all.z, all.w));
        }
    }
    const vec4 totals = of_query(total);
    precise float sum = totals.x + totals.y + totals.z + totals.w;
    const uint query = first_query + own_row();
    // 32 channels at a time.
    [[dont_unroll]] for (uint part = 0; part < CHANNELS / 32; ++part) {
        barrier();
        [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i) {
            const uint first = column + i % COLUMNS * N;
            if (first / 32 != part) continue;
            const uint to = SCORES + i / COLUMNS * M * SCORE_PITCH + first % 32 / 4;
            coopMatStore(result[i], memory, to, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        barrier();
        const uint channel = first_channel + part * 32 + own_lane() * 8;
        if (query >= pixels || channel >= p.out_channels) continue;
        const uint sums = SCORES + own_row() * SCORE_PITCH + own_lane() * 2;
        const vec4 low = uintBitsToFloat(memory[sums]) / sum, high = uintBitsToFloat(memory[sums + 1]) / sum;
        const uvec4 packed = uvec4(pack(low.xy), pack(low.zw), pack(high.xy), pack(high.zw));
        Word4(p.to[gl_WorkGroupID.y] + (uint64_t(query) * p.out_channels + channel) * 2).value = packed;
    }
}
