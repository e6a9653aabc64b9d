#version 460
// Convolutions, as products of a tile of 8 x 16 pixels and TILE_CHANNELS output channels. The sum of an output element
// goes over terms, taps and channels in this order, whichever launch computes it.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "conv_params.glsl"

const int THREADS = 256;
// Two channels of a thread.
#define Own vec2
#define OwnPacked Pair
Own load_floats(uint64_t address) { return Float2(address).value; }
Own load_own(uint64_t address) { return load2(address); }
OwnPacked pack_own(Own x) { return pack(x); }
Own unpack_own(OwnPacked x) { return unpack(x); }
void store_own(uint64_t address, OwnPacked x) { store_pair(address, x); }

// Tiles of input and weights; in the epilogue, moments.
const int PIXEL_PITCH = 8 * 16 + 4;  // four more than pixels, against bank conflicts
const int K_BLOCK = 16;              // input channels of a step
const int INPUT_FLOATS = K_BLOCK * PIXEL_PITCH, WEIGHT_FLOATS = K_BLOCK * TILE_CHANNELS;
shared float memory[INPUT_FLOATS + WEIGHT_FLOATS];
void put_moment(int at, float value) { memory[at] = value; }
float moment(int at) { return memory[at]; }
#include "conv_tile.glsl"

/// Of each pixel and channel of a thread.
float sums[OWN_PIXELS][2 * PAIRS];

/// Transposed: [input channel][pixel].
void load_input(Tile tile, Term term, int tap, int k_block) {
    const InputTap from = input_tap(tile, term, tap);
    [[unroll]] for (int i = 0; i < PIXELS * K_BLOCK / 4 / THREADS; ++i) {
        const int index = int(gl_LocalInvocationIndex) + i * THREADS, pixel = index / 4, quad = index % 4;
        const uint64_t address = input_address(tile, p.source[term.source], from, pixel, k_block * K_BLOCK + quad * 4);
        vec4 value = vec4(0.0);
        if (address != 0) value = load4(address);
        [[unroll]] for (int c = 0; c < 4; ++c) memory[(4 * quad + c) * PIXEL_PITCH + pixel] = value[c];
    }
}

/// Behind the input: [input channel][output channel].
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

void multiply() {
    [[unroll]] for (int k = 0; k < K_BLOCK; ++k) {
        float x[OWN_PIXELS];
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) x[i] = memory[k * PIXEL_PITCH + own_pixel(i)];
        [[unroll]] for (int pair = 0; pair < PAIRS; ++pair) {
            [[unroll]] for (int e = 0; e < 2; ++e) {
                const float w = memory[INPUT_FLOATS + k * TILE_CHANNELS + pair * PAIR_CHANNELS + own_channel() + e];
                [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) sums[i][2 * pair + e] = fma(x[i], w, sums[i][2 * pair + e]);
            }
        }
    }
}

void main() {
    const Tile tile = own_tile();
    [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i)
        [[unroll]] for (int c = 0; c < 2 * PAIRS; ++c) sums[i][c] = 0.0;
    const uint terms = p.frame[tile.frame].terms;
    [[dont_unroll]] for (uint t = 0; t < terms; ++t) {
        const Term term = p.frame[tile.frame].term[t];
        const int taps = p.source[term.source].side * p.source[term.source].side;
        const int k_blocks = (p.source[term.source].channels + K_BLOCK - 1) / K_BLOCK;
        [[dont_unroll]] for (int tap = 0; tap < taps; ++tap) {
            const uint64_t weights = tap_weights(tile, term, tap);
            [[dont_unroll]] for (int k_block = 0; k_block < k_blocks; ++k_block) {
                barrier();
                load_input(tile, term, tap, k_block);
                load_weights(weights, tile, k_block);
                barrier();
                multiply();
            }
        }
    }
    const OutFrame frame = p.frame[tile.frame];
    [[unroll]] for (int pair = 0; pair < PAIRS; ++pair) {
        vec2 own[OWN_PIXELS];
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) own[i] = vec2(sums[i][2 * pair], sums[i][2 * pair + 1]);
        barrier();
        finish_pair(tile, frame, pair, own);
        barrier();
        store_records(tile, frame.record, pair);
    }
}
