#version 460
// Convolutions by the device's matrix unit: products of f16 or bf16, f32 sums. Tiles, parameters and epilogue are those of conv.comp; the
// shape of a matrix and the number of subgroups are the device's. A patch of input, with its halo, serves all taps. While one
// tap multiplies, the next one's weights are loaded. The sum goes over terms, blocks of channels, taps, channels.
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#include "common.glsl"
#include "matrix.glsl"
#include "conv_params.glsl"

layout(constant_id = 0) const uint M = 16;
layout(constant_id = 1) const uint N = 16;
layout(constant_id = 2) const uint K = 16;
layout(constant_id = 3) const uint SUBGROUPS = 4;
layout(constant_id = 4) const uint BUFFERS = 1;  // of weights: two where there is shared memory for them

const int THREADS = 128;
// Four channels of a thread.
#define Own vec4
#define OwnPacked uvec2
Own load_floats(uint64_t address) { return Float4(address).value; }
Own load_own(uint64_t address) { return load4(address); }
OwnPacked pack_own(Own x) { return uvec2(pack(x.xy), pack(x.zw)); }
Own unpack_own(OwnPacked x) { return vec4(unpack(x.x), unpack(x.y)); }
void store_own(uint64_t address, OwnPacked x) { Word2(address).value = x; }

// Shared memory comes in units of 16 bytes, 8 channels. A pixel or an output channel has one more than it needs, against
// bank conflicts.
const uint UNITS = 4, PITCH = UNITS + 1;
const uint PATCH_UNITS = (8 + 2) * (16 + 2) * PITCH, WEIGHT_UNITS = TILE_CHANNELS * PITCH;
// In the epilogue: sums of 32 channels on their way between threads, then moments.
const uint STAGING_UNITS = 8 * 16 * 32 / 4, EPILOGUE_UNITS = STAGING_UNITS + 2 * 16 * 32 / 4;
const uint LOOP_UNITS = PATCH_UNITS + BUFFERS * WEIGHT_UNITS;
shared uvec4 memory[LOOP_UNITS > EPILOGUE_UNITS ? LOOP_UNITS : EPILOGUE_UNITS];

void put_moment(int at, float value) { memory[STAGING_UNITS + at / 4][at % 4] = floatBitsToUint(value); }
float moment(int at) { return uintBitsToFloat(memory[STAGING_UNITS + at / 4][at % 4]); }
#include "conv_tile.glsl"

// A subgroup has four rows of matrices.
const uint ROWS = 4;
const uint ROW_GROUPS = uint(PIXELS) / M / ROWS;
const uint COLUMN_GROUPS = SUBGROUPS / ROW_GROUPS;
const uint COLUMNS = uint(TILE_CHANNELS) / N / COLUMN_GROUPS;
const uint STEPS = uint(WEIGHT_BLOCK) / K;

const int PATCH_LOADS = ((8 + 2) * (16 + 2) * int(UNITS) + THREADS - 1) / THREADS;
const int WEIGHT_LOADS = (TILE_CHANNELS * int(UNITS) + THREADS - 1) / THREADS;

/// Where the sum is: terms, blocks of channels, and taps where each has a patch of its own.
struct Patch {
    uint term;
    int k_block, tap;
};

/// What is the same in a term.
struct Input {
    int channels, k_blocks;
    int side;           // taps in rows and columns
    int patch_columns;  // pixels of a row of a patch
    bool is_patched;    // whether a patch serves all taps; else it serves one
    uint64_t frame;
    uint64_t weights;  // of this thread
    uint64_t tap_bytes;
};

const uint NOWHERE = 0xffffffffu;
const uint PLACE_BYTES = 4 * ELEMENT_BYTES;

Input from;
uint places[PATCH_LOADS];  // of the first block of channels of this thread's units, from the frame's first byte
uvec4 next_patch[PATCH_LOADS], next_weights[WEIGHT_LOADS];

/// This thread's units of the patch that begins with a tap.
void place_patch(Tile tile, uint term_index, int tap) {
    const Term term = p.frame[tile.frame].term[term_index];
    const Source source = p.source[term.source];
    const InputTap first = input_tap(tile, term, tap);
    const int columns = from.patch_columns, rows = from.is_patched ? TILE_ROWS + from.side - 1 : TILE_ROWS;
    from.frame = first.frame;
    [[unroll]] for (int i = 0; i < PATCH_LOADS; ++i) {
        const int index = int(gl_LocalInvocationIndex) + i * THREADS, pixel = index / int(UNITS);
        const int row = tile.top + pixel / columns, column = tile.left + pixel % columns;
        const int y = row * source.stride + first.row_offset, x = column * source.stride + first.column_offset;
        const bool inside = pixel < rows * columns && y >= 0 && y < source.height && x >= 0 && x < source.width;
        // Rows and columns beyond a launch are in no memory. Only what tiles write is read.
        const bool needed = row - (rows - TILE_ROWS) < p.height && column - (columns - TILE_COLUMNS) < p.width;
        const int64_t at = int64_t(y - source.first_row) * first.pitch + (x - first.first_column);
        const uint place = uint(at * (source.channels / 4)) + uint(index) % UNITS * 2;
        places[i] = inside && needed ? place : NOWHERE;
    }
}

void begin_term(Tile tile, uint term_index) {
    const Term term = p.frame[tile.frame].term[term_index];
    const Source source = p.source[term.source];
    from.channels = source.channels;
    from.k_blocks = source.k_blocks;
    from.side = source.side;
    from.is_patched = source.stride == 1;
    from.patch_columns = from.is_patched ? TILE_COLUMNS + source.side - 1 : TILE_COLUMNS;
    from.weights = tap_weights(tile, term, 0) + uint64_t(tile.channel * WEIGHT_BLOCK) * ELEMENT_BYTES;
    from.weights += gl_LocalInvocationIndex * 16;
    from.tap_bytes = uint64_t(tap_bytes(source));
}

void fetch_patch(int k_block) {
    const int channel = k_block * WEIGHT_BLOCK + int(gl_LocalInvocationIndex) % int(UNITS) * 8;
    const bool inside = channel < from.channels;
    const uint64_t block = from.frame + uint64_t(k_block * WEIGHT_BLOCK) * ELEMENT_BYTES;
    [[unroll]] for (int i = 0; i < PATCH_LOADS; ++i) {
        next_patch[i] = uvec4(0);
        if (places[i] == NOWHERE || !inside) continue;
        const uint64_t place = block + uint64_t(places[i]) * PLACE_BYTES;
        // Pixels of few channels have half a unit.
        if (from.channels < 8) next_patch[i].xy = Word2(place).value;
        else next_patch[i] = ReadOnly4(place).value;
    }
}

/// [block of channels][output channel][channel].
uint64_t first_weights(Patch at) {
    return from.weights + at.tap * from.tap_bytes + uint64_t(at.k_block * WEIGHT_BLOCK * p.padded_cout) * ELEMENT_BYTES;
}

void fetch_weights(uint64_t first) {
    [[unroll]] for (int i = 0; i < WEIGHT_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS;
        if (index < TILE_CHANNELS * UNITS) next_weights[i] = ReadOnly4(first + uint64_t(i * THREADS) * 16).value;
    }
}

void put_patch() {
    [[unroll]] for (int i = 0; i < PATCH_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS, to = index / UNITS * PITCH + index % UNITS;
        if (to < PATCH_UNITS) memory[to] = next_patch[i];
    }
}

void put_weights(uint to) {
    [[unroll]] for (int i = 0; i < WEIGHT_LOADS; ++i) {
        const uint index = gl_LocalInvocationIndex + i * THREADS;
        if (index < TILE_CHANNELS * UNITS) memory[to + index / UNITS * PITCH + index % UNITS] = next_weights[i];
    }
}

Patch after(Patch at) {
    if (!from.is_patched && ++at.tap < from.side * from.side) return at;
    at.tap = 0;
    if (++at.k_block < from.k_blocks) return at;
    return Patch(at.term + 1, 0, 0);
}

coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator> result[ROWS * COLUMNS];

/// Adds the products of a tap. `pixels`: the places of this subgroup's first pixels of each row of matrices.
void multiply(uint pixels[ROWS], uint weights) {
    [[unroll]] for (uint k = 0; k < STEPS; ++k) {
        coopmat<MatrixElement, gl_ScopeSubgroup, M, K, gl_MatrixUseA> a[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; ++r)
            coopMatLoad(a[r], memory, pixels[r] + k * K / 8, PITCH, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint c = 0; c < COLUMNS; ++c) {
            coopmat<MatrixElement, gl_ScopeSubgroup, K, N, gl_MatrixUseB> b;
            coopMatLoad(b, memory, weights + c * N * PITCH + k * K / 8, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint r = 0; r < ROWS; ++r)
                result[r * COLUMNS + c] = coopMatMulAdd(a[r], b, result[r * COLUMNS + c]);
        }
    }
}

void main() {
    const Tile tile = own_tile();
    [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i)
        result[i] = coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>(0.0);
    const uint row = gl_SubgroupID / COLUMN_GROUPS * ROWS * M, column = gl_SubgroupID % COLUMN_GROUPS * COLUMNS * N;
    const uint terms = p.frame[tile.frame].terms;
    Patch at = Patch(0, 0, 0);
    begin_term(tile, 0);
    place_patch(tile, 0, 0);
    fetch_patch(0);
    uint64_t weights = first_weights(at);
    fetch_weights(weights);
    uint filled = PATCH_UNITS;
    [[dont_unroll]] while (at.term < terms) {
        const uint columns = uint(from.patch_columns), side = from.is_patched ? uint(from.side) : 1;
        const uint64_t tap_bytes = from.tap_bytes;
        barrier();
        put_patch();
        const Patch next = after(at);
        const bool has_next = next.term < terms;
        if (has_next && next.term != at.term) begin_term(tile, next.term);
        if (has_next && (next.term != at.term || !from.is_patched)) place_patch(tile, next.term, next.tap);
        const uint64_t next_weights_of = has_next ? first_weights(next) : weights;
        uint pixels[ROWS];
        [[unroll]] for (uint r = 0; r < ROWS; ++r) {
            const uint pixel = row + r * M;
            pixels[r] = (pixel / TILE_COLUMNS * columns + pixel % TILE_COLUMNS) * PITCH;
        }
        uint left = side * side, x = side;
        [[dont_unroll]] while (left > 0) {
            put_weights(filled);
            barrier();
            --left;
            weights = left > 0 ? weights + tap_bytes : next_weights_of;
            // Behind the last tap the same ones again, which nobody reads.
            fetch_weights(weights);
            if (left + 1 == side * side && has_next) fetch_patch(next.k_block);
            multiply(pixels, filled + column * PITCH);
            // The next tap: one pixel on, or in the next row.
            const bool ends_row = --x == 0;
            x = ends_row ? side : x;
            [[unroll]] for (uint r = 0; r < ROWS; ++r) pixels[r] += (ends_row ? columns - side + 1 : 1) * PITCH;
            if (BUFFERS == 2) filled = 2 * PATCH_UNITS + WEIGHT_UNITS - filled;
            else if (left > 0) barrier();
        }
        at = next;
    }
    // To the threads that the epilogue wants them in: 32 channels at a time. A loop, so that its code is short.
    const OutFrame frame = p.frame[tile.frame];
    [[dont_unroll]] for (int pair = 0; pair < PAIRS; ++pair) {
        barrier();
        if (pair > 0) store_records(tile, frame.record, pair - 1);
        [[unroll]] for (uint i = 0; i < ROWS * COLUMNS; ++i) {
            const uint first = column + i % COLUMNS * N;
            if (first / PAIR_CHANNELS != pair) continue;
            const uint to = (row + i / COLUMNS * M) * PAIR_CHANNELS + first % PAIR_CHANNELS;
            coopMatStore(result[i], memory, to / 4, PAIR_CHANNELS / 4, gl_CooperativeMatrixLayoutRowMajor);
        }
        barrier();
        Own sums[OWN_PIXELS];
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i)
            sums[i] = uintBitsToFloat(memory[(own_pixel(i) * PAIR_CHANNELS + own_channel()) / 4]);
        finish_pair(tile, frame, pair, sums);
    }
    barrier();
    store_records(tile, frame.record, PAIRS - 1);
}
