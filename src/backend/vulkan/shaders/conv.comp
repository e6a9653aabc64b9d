#version 460
// Convolutions, as products of a tile of 8 x 16 pixels and TILE_CHANNELS output channels. The sum of an output element
// goes over terms, taps and channels in this order, whichever launch computes it.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "conv_params.glsl"

const int TILE_ROWS = 8, TILE_COLUMNS = 16, PIXELS = TILE_ROWS * TILE_COLUMNS;
const int THREADS = 256;
const int K_BLOCK = 16;       // input channels of a step
const int OWN_PIXELS = 8;     // of a thread, side by side
const int PAIRS = TILE_CHANNELS / 32;  // pairs of output channels of a thread
const int PIXEL_PITCH = PIXELS + 4;    // one more unit than pixels, against bank conflicts

layout(local_size_x = THREADS) in;
layout(push_constant, scalar) uniform Push { ConvParams p; };

// [input channel][pixel], then [input channel][output channel]. The epilogue keeps moments here.
const int INPUT_FLOATS = K_BLOCK * PIXEL_PITCH, WEIGHT_FLOATS = K_BLOCK * TILE_CHANNELS;
const int MOMENT_FLOATS = 2 * 16 * TILE_CHANNELS;
shared float memory[max(INPUT_FLOATS + WEIGHT_FLOATS, MOMENT_FLOATS)];

struct Tile {
    int top, left;  // of the tile grid
    int channel;    // the first output channel
    int phase, frame, row;
};

Tile own_tile() {
    const int z = int(gl_WorkGroupID.z), tiles = p.channel_tiles;
    Tile tile;
    tile.channel = z % tiles * TILE_CHANNELS;
    tile.phase = z / tiles % p.phases;
    tile.frame = z / tiles / p.phases;
    tile.row = p.first_row / TILE_ROWS + int(gl_WorkGroupID.y);
    tile.top = tile.row * TILE_ROWS;
    tile.left = int(gl_WorkGroupID.x) * TILE_COLUMNS;
    return tile;
}

/// Channels of an input tile, transposed.
void put_input(int pixel, int quad, vec4 x) {
    [[unroll]] for (int c = 0; c < 4; ++c) memory[(4 * quad + c) * PIXEL_PITCH + pixel] = x[c];
}

void load_input(Tile tile, Term term, int tap, int k_block) {
    const Source source = p.source[term.source];
    const bool is_up = p.phases > 1;
    const int row_offset = tap / source.side + source.offset + (is_up ? tile.phase / 2 : 0);
    const int column_offset = tap % source.side + source.offset + (is_up ? tile.phase % 2 : 0);
    const bool in_host = term.host != 0 && tile.left >= p.split_column;
    const int first_column = in_host ? p.host_first : 0;
    const int pitch = term.host == 0 ? source.width : in_host ? p.host_width : p.resident_width;
    const uint64_t frame = in_host ? term.host : term.frame;
    [[unroll]] for (int i = 0; i < PIXELS * K_BLOCK / 4 / THREADS; ++i) {
        const int index = int(gl_LocalInvocationIndex) + i * THREADS, pixel = index / 4, quad = index % 4;
        const int y = (tile.top + pixel / TILE_COLUMNS) * source.stride + row_offset;
        const int x = (tile.left + pixel % TILE_COLUMNS) * source.stride + column_offset;
        const int channel = k_block * K_BLOCK + quad * 4;
        const bool has_output = tile.top + pixel / TILE_COLUMNS < p.height && tile.left + pixel % TILE_COLUMNS < p.width;
        const bool inside = y >= 0 && y < source.height && x >= 0 && x < source.width;
        vec4 value = vec4(0.0);
        if (inside && has_output && channel < source.channels) {
            const int64_t at = int64_t(y - source.first_row) * pitch + (x - first_column);
            value = load4(frame + uint64_t(at * source.channels + channel) * ELEMENT_BYTES);
        }
        put_input(pixel, quad, value);
    }
}

void load_weights(uint64_t weights, Tile tile, int k_block) {
    [[unroll]] for (int i = 0; i < (WEIGHT_FLOATS / 4 + THREADS - 1) / THREADS; ++i) {
        const int index = int(gl_LocalInvocationIndex) + i * THREADS;
        if (WEIGHT_FLOATS / 4 % THREADS != 0 && index >= WEIGHT_FLOATS / 4) break;
        const int k = index / (TILE_CHANNELS / 4), channel = index % (TILE_CHANNELS / 4) * 4;
        const int64_t at = int64_t(k_block * K_BLOCK + k) * p.padded_cout + tile.channel + channel;
        const vec4 value = load4(weights + uint64_t(at) * ELEMENT_BYTES);
        [[unroll]] for (int c = 0; c < 4; ++c) memory[INPUT_FLOATS + k * TILE_CHANNELS + channel + c] = value[c];
    }
}

/// Output channel `pair` of a thread, from the tile's first on.
int own_channel(int pair) { return pair * 32 + int(gl_LocalInvocationIndex % 16) * 2; }

/// Pixel `i` of a thread.
int own_pixel(int i) { return int(gl_LocalInvocationIndex / 16) * OWN_PIXELS + i; }

/// Edges of an upsampler have biases of their own: 1 in the phase's outer row, 2 in its outer column, 3 in both.
int bias_row(Tile tile, uint bias, int y, int x) {
    if (p.phases == 1) return int(bias);
    const bool outer_row = y == (tile.phase / 2 == 0 ? 0 : p.height - 1);
    const bool outer_column = x == (tile.phase % 2 == 0 ? 0 : p.width - 1);
    return int(bias) * 16 + tile.phase * 4 + (outer_row ? 1 : 0) + (outer_column ? 2 : 0);
}

/// Merges the moments of 16 threads that have pixels of the same channel: mean, and sum of squared deviations.
void store_record(Tile tile, uint record) {
    const int channel = int(gl_LocalInvocationIndex);
    if (channel >= TILE_CHANNELS) return;
    const int rows = min(p.height - tile.top, TILE_ROWS), columns = min(p.width - tile.left, TILE_COLUMNS);
    float total = 0.0, squares = 0.0;
    for (int part = 0; part < 16; ++part) {
        const float count = part / 2 < rows ? float(clamp(columns - part % 2 * OWN_PIXELS, 0, OWN_PIXELS)) : 0.0;
        total += count * memory[part * TILE_CHANNELS + channel];
    }
    const float mean = total / float(rows * columns);
    for (int part = 0; part < 16; ++part) {
        const float count = part / 2 < rows ? float(clamp(columns - part % 2 * OWN_PIXELS, 0, OWN_PIXELS)) : 0.0;
        const float difference = memory[part * TILE_CHANNELS + channel] - mean;
        squares += memory[(16 + part) * TILE_CHANNELS + channel] + count * difference * difference;
    }
    const int tiles_x = (p.width + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles_y = (p.height + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t at = (int64_t(record * p.phases + tile.phase) * tiles_y + tile.row) * tiles_x + int(gl_WorkGroupID.x);
    Float2(p.records + uint64_t(at * p.padded_cout + tile.channel + channel) * 8).value = vec2(mean, squares);
}

float sums[OWN_PIXELS][2 * PAIRS];

void multiply() {
    [[unroll]] for (int k = 0; k < K_BLOCK; ++k) {
        float x[OWN_PIXELS];
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) x[i] = memory[k * PIXEL_PITCH + own_pixel(i)];
        [[unroll]] for (int pair = 0; pair < PAIRS; ++pair) {
            [[unroll]] for (int e = 0; e < 2; ++e) {
                const float w = memory[INPUT_FLOATS + k * TILE_CHANNELS + own_channel(pair) + e];
                [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) sums[i][2 * pair + e] = fma(x[i], w, sums[i][2 * pair + e]);
            }
        }
    }
}

void epilogue(Tile tile) {
    const OutFrame frame = p.frame[tile.frame];
    const int by = p.phases > 1 ? 2 : 1;
    [[unroll]] for (int pair = 0; pair < PAIRS; ++pair) {
        const int channel = tile.channel + own_channel(pair);
        const bool is_stored = channel < p.cout;
        vec2 total = vec2(0.0);
        float count = 0.0;
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) {
            const int y = tile.top + own_pixel(i) / TILE_COLUMNS, x = tile.left + own_pixel(i) % TILE_COLUMNS;
            if (y >= p.height || x >= p.width) continue;
            const int64_t bias = int64_t(bias_row(tile, frame.bias, y, x)) * p.padded_cout + channel;
            vec2 value = vec2(sums[i][2 * pair], sums[i][2 * pair + 1]) + Float2(p.bias + uint64_t(bias) * 4).value;
            if (is_stored) {
                const int64_t row = int64_t(y) * by + (by == 2 ? tile.phase / 2 : 0);
                const int64_t pixel = row * (int64_t(p.width) * by) + x * by + (by == 2 ? tile.phase % 2 : 0);
                const uint64_t at = uint64_t(pixel * p.cout + channel) * ELEMENT_BYTES;
                if (frame.residual != 0) value += load2(frame.residual + at);
                store2(frame.target + at, value);
            }
            value = vec2(rounded(value.x), rounded(value.y));
            sums[i][2 * pair] = value.x;
            sums[i][2 * pair + 1] = value.y;
            total += value;
            count += 1.0;
        }
        const vec2 mean = count > 0.0 ? total / count : vec2(0.0);
        vec2 squares = vec2(0.0);
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) {
            const int y = tile.top + own_pixel(i) / TILE_COLUMNS, x = tile.left + own_pixel(i) % TILE_COLUMNS;
            if (y >= p.height || x >= p.width) continue;
            const vec2 difference = vec2(sums[i][2 * pair], sums[i][2 * pair + 1]) - mean;
            squares += difference * difference;
        }
        const int part = int(gl_LocalInvocationIndex / 16);
        [[unroll]] for (int e = 0; e < 2; ++e) {
            memory[part * TILE_CHANNELS + own_channel(pair) + e] = mean[e];
            memory[(16 + part) * TILE_CHANNELS + own_channel(pair) + e] = squares[e];
        }
    }
    barrier();
    if (p.records != 0) store_record(tile, frame.record);
}

void main() {
    const Tile tile = own_tile();
    [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i)
        [[unroll]] for (int c = 0; c < 2 * PAIRS; ++c) sums[i][c] = 0.0;
    const uint terms = p.frame[tile.frame].terms;
    [[dont_unroll]] for (uint t = 0; t < terms; ++t) {
        const Term term = p.frame[tile.frame].term[t];
        const int taps = p.source[term.source].side * p.source[term.source].side;
        const int k_blocks = p.source[term.source].k_blocks;
        const int64_t tap_bytes = int64_t(k_blocks) * K_BLOCK * p.padded_cout * ELEMENT_BYTES;
        // A shortcut has one tap for all phases.
        const int first_tap = term.source == 0 ? tile.phase * taps : 0;
        uint64_t weights = p.source[term.source].weights + term.slab * p.source[term.source].slab_bytes;
        weights += uint64_t(first_tap * tap_bytes);
        [[dont_unroll]] for (int tap = 0; tap < taps; ++tap) {
            [[dont_unroll]] for (int k_block = 0; k_block < k_blocks; ++k_block) {
                barrier();
                load_input(tile, term, tap, k_block);
                load_weights(weights + uint64_t(tap * tap_bytes), tile, k_block);
                barrier();
                multiply();
            }
        }
    }
    barrier();
    epilogue(tile);
}
