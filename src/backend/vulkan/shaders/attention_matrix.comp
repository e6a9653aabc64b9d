#version 460
// softmax(q k^T) v by the device's matrix unit: products of f16 or bf16, f32 sums. A workgroup has 64 queries and 512 channels of the
// result. It goes through the keys once: weights are of the difference to a reference, one for each query. Where a score
// is far above it, the reference grows, and the sums so far are corrected. Channels are a multiple of 64.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "common.glsl"
#include "matrix.glsl"
#include "attention_params.glsl"

layout(constant_id = 0) const uint M = 16;
layout(constant_id = 1) const uint N = 16;
layout(constant_id = 2) const uint K = 16;
layout(constant_id = 3) const uint SUBGROUPS = 8;

const uint THREADS = 256, QUERIES = 64, KEYS = 64, CHANNELS = 512;
const uint CHUNK = 64;       // channels of queries and keys at a time
const uint VALUE_KEYS = 16;  // keys whose values are multiplied at a time
// Scores may be so much above the reference. Weights are then e^8 = 2981 at most, which f16 has room for, and so are sums.
const float LAG = 8.0;
// Below the scores of every model: products of f16 sum up to 1e13 at most; those of bf16 may sum to more than this, where
// results then are wrong. A finite number, so that no difference is undefined.
#if defined(VVAE_BF16)
const float NEVER = -3e38;
#else
const float NEVER = -1e30;
#endif
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
shared uint grown;  // the last block of keys, by its first, that made a reference grow

// Tiles of scores of a subgroup, side by side; and of the result.
const uint SCORE_COLUMNS = KEYS / N, SCORE_TILES = QUERIES / M * SCORE_COLUMNS / SUBGROUPS;
const uint ROWS = QUERIES / M, COLUMNS = CHANNELS / N / SUBGROUPS;

const uint CHUNK_LOADS = (QUERIES + KEYS) * CHUNK_UNITS / THREADS, VALUE_LOADS = VALUE_KEYS * VALUE_UNITS / THREADS;

// A subgroup multiplies the values of its own channels alone, so it loads them itself and waits for no other.
const uint LANES = THREADS / SUBGROUPS, OWN_UNITS = VALUE_UNITS / SUBGROUPS;

/// For shared memory alone: loads of other memory are not waited for.
void subgroup_barrier() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared, gl_SemanticsAcquireRelease);
}

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
        const uint index = gl_SubgroupInvocationID + i * LANES, unit = gl_SubgroupID * OWN_UNITS + index % OWN_UNITS;
        values[i] = channels_of(frame, first_key + index / OWN_UNITS, 2, first_channel + unit * 8);
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
        coopmat<MatrixElement, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a;
        coopMatLoad(a, memory, row * CHUNK_PITCH + k / 8, CHUNK_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint i = 0; i < SCORE_TILES; ++i) {
            coopmat<MatrixElement, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
            const uint key = (QUERIES + column + i * N) * CHUNK_PITCH + k / 8;
            coopMatLoad(b, memory, key, CHUNK_PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            scores[i] = coopMatMulAdd(a, b, scores[i]);
        }
    }
}

void put_values(uvec4 values[VALUE_LOADS]) {
    [[unroll]] for (uint i = 0; i < VALUE_LOADS; ++i) {
        const uint index = gl_SubgroupInvocationID + i * LANES, unit = gl_SubgroupID * OWN_UNITS + index % OWN_UNITS;
        memory[index / OWN_UNITS * VALUE_PITCH + unit] = values[i];
    }
}

// Of the subgroup's first tile of scores.
uint score_row() { return gl_SubgroupID * SCORE_TILES / SCORE_COLUMNS * M; }
uint score_column() { return gl_SubgroupID * SCORE_TILES % SCORE_COLUMNS * N; }

/// The scores of all queries and of some keys. The first chunk is in shared memory.
void score(uint64_t frame, uint first_query, uint first_key, out Scores scores[SCORE_TILES]) {
    [[unroll]] for (uint i = 0; i < SCORE_TILES; ++i)
        scores[i] = Scores(0.0);
    const uint row = score_row(), column = score_column();
    // Two chunks ahead: one is not computed as long as another takes to come.
    uvec4 even[CHUNK_LOADS], odd[CHUNK_LOADS];
    fetch_chunk(frame, first_query, first_key, CHUNK, odd);
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
        if (chunk + 2 * CHUNK >= channels) break;
        barrier();
        put_chunk(even);
    }
}

void put_scores(Scores scores[SCORE_TILES]) {
    [[unroll]] for (uint i = 0; i < SCORE_TILES; ++i) {
        const uint to = SCORES + score_row() * SCORE_PITCH + (score_column() + i * N) / 4;
        coopMatStore(scores[i], memory, to, SCORE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
    }
}

// Four threads of one subgroup share a query; each has 16 of the keys.
const uint OWN_KEYS = KEYS / 4;
uint own_thread() { return gl_SubgroupID * LANES + gl_SubgroupInvocationID; }
uint own_row() { return own_thread() / 4; }
uint own_lane() { return own_thread() % 4; }

/// What the four threads of a query have, for all of them. It goes through the unit of a row that no weights are in.
vec4 of_query(float own) {
    const uint at = WEIGHTS + own_row() * WEIGHT_PITCH + KEYS / 8;
    memory[at][own_lane()] = floatBitsToUint(own);
    subgroup_barrier();
    return uintBitsToFloat(memory[at]);
}

// Of this thread's query: what scores are compared with. And the sum of the weights that this thread has made.
float reference = NEVER, total = 0.0;

/// Puts this thread's weights into shared memory. The factor of the sums so far, 1 where the reference stays.
float weigh(uint first_key) {
    const uint count = min(KEYS, pixels - first_key);
    float scores[OWN_KEYS], most = NEVER;
    [[unroll]] for (uint i = 0; i < OWN_KEYS; i += 4) {
        const uint unit = SCORES + own_row() * SCORE_PITCH + (own_lane() * OWN_KEYS + i) / 4;
        const vec4 four = uintBitsToFloat(memory[unit]);
        [[unroll]] for (uint j = 0; j < 4; ++j) {
            scores[i + j] = own_lane() * OWN_KEYS + i + j < count ? four[j] : NEVER;
            most = max(most, scores[i + j]);
        }
    }
    const vec4 all = of_query(most);
    most = max(max(all.x, all.y), max(all.z, all.w));
    const float next = most > reference + LAG ? most : reference;
    // Nothing is to be corrected in the first block.
    if (next != reference && first_key > 0) atomicMax(grown, first_key);
    const float factor = exponential(reference - next);
    reference = next;
    uint pairs[OWN_KEYS / 2];
    float added = 0.0;
    [[unroll]] for (uint i = 0; i < OWN_KEYS; i += 2) {
        pairs[i / 2] = pack(vec2(exponential(scores[i] - next), exponential(scores[i + 1] - next)));
        // As they are multiplied.
        const vec2 weight = unpack(pairs[i / 2]);
        added += weight.x + weight.y;
    }
    [[unroll]] for (uint i = 0; i < OWN_KEYS / 8; ++i) {
        const uvec4 eight = uvec4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
        memory[WEIGHTS + own_row() * WEIGHT_PITCH + own_lane() * OWN_KEYS / 8 + i] = eight;
    }
    precise float corrected = total * factor;
    total = corrected + added;
    return factor;
}

coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> result[ROWS * COLUMNS];

/// Multiplies the sums so far by a factor for each query. Which thread has which of a matrix is unknown, so factors come as a
/// matrix of equal columns.
void correct(float factor) {
    [[unroll]] for (uint i = 0; i < N / 4; ++i)
        if (own_lane() == i % 4) memory[SCORES + own_row() * (N / 4) + i] = uvec4(floatBitsToUint(factor));
    barrier();
    [[unroll]] for (uint r = 0; r < ROWS; ++r) {
        coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> factors;
        coopMatLoad(factors, memory, SCORES + r * M * N / 4, N / 4, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint c = 0; c < COLUMNS; ++c)
            result[r * COLUMNS + c] = result[r * COLUMNS + c] * factors;
    }
    barrier();
}

/// Adds the products of the values in shared memory and their weights, which begin with a key.
void multiply(uint key) {
    const uint column = gl_SubgroupID * COLUMNS * N;
    [[unroll]] for (uint k = 0; k < VALUE_KEYS; k += K) {
        coopmat<MatrixElement, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            const uint from = WEIGHTS + r * M * WEIGHT_PITCH + (key + k) / 8;
            coopMatLoad(a[r], memory, from, WEIGHT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        }
        [[unroll]] for (uint c = 0; c < COLUMNS; ++c) {
            coopmat<MatrixElement, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
            const uint from = k * VALUE_PITCH + (column + c * N) / 8;
            coopMatLoad(b, memory, from, VALUE_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint r = 0; r < ROWS; ++r)
                result[r * COLUMNS + c] = coopMatMulAdd(a[r], b, result[r * COLUMNS + c]);
        }
    }
}

void main() {
    pixels = p.pixels;
    channels = p.channels;
    pixel_channels = p.input_channels;
    const uint first_query = p.first_query + gl_WorkGroupID.x * QUERIES, first_channel = gl_WorkGroupID.z * CHANNELS;
    const uint64_t frame = p.from[gl_WorkGroupID.y];
    [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i)
        result[i] = coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>(0.0);
    if (gl_LocalInvocationIndex == 0) grown = 0;
    uvec4 chunk[CHUNK_LOADS];
    fetch_chunk(frame, first_query, 0, 0, chunk);
    put_chunk(chunk);
    [[dont_unroll]] for (uint first_key = 0; first_key < pixels; first_key += KEYS) {
        Scores scores[SCORE_TILES];
        score(frame, first_query, first_key, scores);
        uvec4 values[VALUE_LOADS];
        fetch_values(frame, first_key, first_channel, values);
        barrier();
        put_scores(scores);
        barrier();
        const float factor = weigh(first_key);
        barrier();
        if (first_key > 0 && grown == first_key) correct(factor);
        put_values(values);
        [[dont_unroll]] for (uint key = 0; key < KEYS - VALUE_KEYS; key += VALUE_KEYS) {
            subgroup_barrier();
            fetch_values(frame, first_key + key + VALUE_KEYS, first_channel, values);
            multiply(key);
            subgroup_barrier();
            put_values(values);
        }
        subgroup_barrier();
        // The next block's first chunk, in variables of its own: copies would wait for it. Behind the last one nobody reads it.
        uvec4 next[CHUNK_LOADS];
        fetch_chunk(frame, first_query, first_key + KEYS, 0, next);
        multiply(KEYS - VALUE_KEYS);
        barrier();
        put_chunk(next);
    }
    const vec4 totals = of_query(total);
    precise float sum = totals.x + totals.y + totals.z + totals.w;
    const uint query = first_query + own_row(), column = gl_SubgroupID * COLUMNS * N;
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
