#version 460
// Convolutions by the device's matrix unit: f16 products, f32 sums. Tiles, parameters and epilogue are those of conv.comp; the
// shape of a matrix and the number of subgroups are the device's. While one step multiplies, the next one is loaded.
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "common.glsl"
#include "conv_params.glsl"
#include "conv_tile.glsl"

layout(constant_id = 0) const uint M = 16;
layout(constant_id = 1) const uint N = 16;
layout(constant_id = 2) const uint K = 16;
layout(constant_id = 3) const uint SUBGROUPS = 8;

// A subgroup has two rows of matrices.
const uint ROWS = 2;
const uint ROW_GROUPS = uint(PIXELS) / M / ROWS;
const uint COLUMN_GROUPS = SUBGROUPS / ROW_GROUPS;
const uint COLUMNS = uint(TILE_CHANNELS) / N / COLUMN_GROUPS;
const uint STEPS = uint(K_BLOCK) / K;

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Half4 { f16vec4 value; };

// Eight more than needed, against bank conflicts.
const uint INPUT_PITCH = uint(K_BLOCK) + 8, WEIGHT_PITCH = uint(TILE_CHANNELS) + 8;
shared float16_t inputs[uint(PIXELS) * INPUT_PITCH];
shared float16_t weights[uint(K_BLOCK) * WEIGHT_PITCH];

const int INPUT_LOADS = PIXELS * K_BLOCK / 4 / THREADS;
const int WEIGHT_LOADS = (K_BLOCK * TILE_CHANNELS / 4 + THREADS - 1) / THREADS;

/// Where the sum is: terms, taps, blocks of channels.
struct Step {
    uint term;
    int tap, k_block;
};

f16vec4 next_input[INPUT_LOADS], next_weights[WEIGHT_LOADS];

void fetch(Tile tile, Step at) {
    const Term term = p.frame[tile.frame].term[at.term];
    const Source source = p.source[term.source];
    const InputTap from = input_tap(tile, term, at.tap);
    [[unroll]] for (int i = 0; i < INPUT_LOADS; ++i) {
        const int index = int(gl_LocalInvocationIndex) + i * THREADS, channel = at.k_block * K_BLOCK + index % 4 * 4;
        const uint64_t address = input_address(tile, source, from, index / 4, channel);
        next_input[i] = f16vec4(0.0);
        if (address != 0) next_input[i] = Half4(address).value;
    }
    const uint64_t first = tap_weights(tile, term, at.tap);
    [[unroll]] for (int i = 0; i < WEIGHT_LOADS; ++i) {
        const int index = int(gl_LocalInvocationIndex) + i * THREADS;
        if (index >= K_BLOCK * TILE_CHANNELS / 4) break;
        const int k = at.k_block * K_BLOCK + index / (TILE_CHANNELS / 4), channel = index % (TILE_CHANNELS / 4) * 4;
        const int64_t place = int64_t(k) * p.padded_cout + tile.channel + channel;
        next_weights[i] = Half4(first + uint64_t(place) * ELEMENT_BYTES).value;
    }
}

void put() {
    [[unroll]] for (int i = 0; i < INPUT_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS, to = index / 4 * INPUT_PITCH + index % 4 * 4;
        [[unroll]] for (int c = 0; c < 4; ++c) inputs[to + c] = next_input[i][c];
    }
    [[unroll]] for (int i = 0; i < WEIGHT_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS;
        if (index >= K_BLOCK * TILE_CHANNELS / 4) break;
        const uint to = index / (TILE_CHANNELS / 4) * WEIGHT_PITCH + index % (TILE_CHANNELS / 4) * 4;
        [[unroll]] for (int c = 0; c < 4; ++c) weights[to + c] = next_weights[i][c];
    }
}

Step after(Tile tile, Step at) {
    const Source source = p.source[p.frame[tile.frame].term[at.term].source];
    if (++at.k_block < source.k_blocks) return at;
    at.k_block = 0;
    if (++at.tap < source.side * source.side) return at;
    at.tap = 0;
    ++at.term;
    return at;
}

void main() {
    const Tile tile = own_tile();
    coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> result[ROWS * COLUMNS];
    [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i)
        result[i] = coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>(0.0);
    const uint row = gl_SubgroupID / COLUMN_GROUPS * ROWS * M, column = gl_SubgroupID % COLUMN_GROUPS * COLUMNS * N;
    const uint terms = p.frame[tile.frame].terms;
    Step at = Step(0, 0, 0);
    fetch(tile, at);
    [[dont_unroll]] while (at.term < terms) {
        barrier();
        put();
        barrier();
        at = after(tile, at);
        if (at.term < terms) fetch(tile, at);
        [[unroll]] for (uint k = 0; k < STEPS; ++k) {
            coopmat<float16_t, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a[ROWS];
            [[unroll]] for (uint r = 0; r < ROWS; ++r)
                coopMatLoad(a[r], inputs, (row + r * M) * INPUT_PITCH + k * K, INPUT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
            [[unroll]] for (uint c = 0; c < COLUMNS; ++c) {
                coopmat<float16_t, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
                coopMatLoad(b, weights, k * K * WEIGHT_PITCH + column + c * N, WEIGHT_PITCH, gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint r = 0; r < ROWS; ++r)
                    result[r * COLUMNS + c] = coopMatMulAdd(a[r], b, result[r * COLUMNS + c]);
            }
        }
    }
    // To the threads that the epilogue wants them in: 32 channels at a time.
    [[unroll]] for (int pair = 0; pair < PAIRS; ++pair) {
        barrier();
        [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i) {
            const uint first = column + i % COLUMNS * N;
            if (first / 32 != pair) continue;
            const uint to = (row + i / COLUMNS * M) * 32 + first % 32;
            coopMatStore(result[i], memory, to, 32, gl_CooperativeMatrixLayoutRowMajor);
        }
        barrier();
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i)
            [[unroll]] for (int e = 0; e < 2; ++e)
                sums[i][2 * pair + e] = memory[own_pixel(i) * 32 + own_channel(0) + e];
    }
    barrier();
    epilogue(tile);
}
