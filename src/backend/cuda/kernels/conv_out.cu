// 3x3 convolution of many channels to at most 3: bound by reading the input.
//
// A matrix product with 3 columns would leave the tensor cores idle, and 9 taps would read each pixel 9 times. So the
// taps become columns: every pixel of the patch is multiplied once by 9 taps x 3 outputs = 27 columns (32 with
// padding), all terms summed, and an output pixel then adds up 9 x 3 of these products, its neighbours' and its own.
// Pixels go from global memory straight into registers: the order of input channels is free, so a lane takes a unit of
// neighbouring ones and the weights are packed to match.
#include "ampere.cuh"
#include "conv.cuh"

constexpr int TILE = 16, SIDE = TILE + 2, PATCH = SIDE * SIDE;
constexpr int THREADS = 256, WARPS = 8;
constexpr int ROWS_OF_16 = 3;                  // of a warp: 8 * 3 * 16 >= 324
constexpr int OUTPUTS = 3, TAPS = 9, BLOCKS = 4;  // blocks of 8 columns
constexpr int PITCH = 29;                      // floats of a pixel's products; odd, so neighbours lie in other banks
constexpr int TERMS = 3, MAX_CHANNELS = 128;
constexpr int GROUP = 4 * UNIT;                // channels that the four lanes of a pixel load at once, for two products

struct Shared {
    float products[PATCH][PITCH];
    u32 weights[TERMS][MAX_CHANNELS / GROUP][2][32][2 * BLOCKS];  // [term][group][product][lane][block, half]
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_out(const __grid_constant__ ConvParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const Source& source = p.source[0];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const Tile tile(p, blockIdx.x, TILE, TILE);
    const Frame& frame = p.frame[tile.frame];
    const int groups = (source.channels + GROUP - 1) / GROUP;

    const int slab_words = groups * 2 * 32 * 2 * BLOCKS;
    for (int term = 0; term < frame.terms; ++term) {
        const uint4* from = reinterpret_cast<const uint4*>(source.weights) + static_cast<i64>(frame.slab[term]) * slab_words / 4;
        for (int i = threadIdx.x; i < slab_words / 4; i += THREADS) reinterpret_cast<uint4*>(shared.weights[term])[i] = __ldg(from + i);
    }
    __syncthreads();

    // Where this lane's pixels lie in a frame, in units of 16 bytes; negative outside the image.
    i64 place[ROWS_OF_16][2];
#pragma unroll
    for (int m = 0; m < ROWS_OF_16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (m * WARPS + warp) * 16 + half * 8 + lane / 4;
            const int x = tile.x + source.plane[0].dx + at % SIDE, y = tile.y + source.plane[0].dy + at / SIDE;
            const bool inside = at < PATCH && static_cast<u32>(x) < source.width && static_cast<u32>(y) < source.height;
            place[m][half] = inside ? (static_cast<i64>(y) * source.width + x) * (source.channels / UNIT) + t : -1;
        }

    float acc[ROWS_OF_16][BLOCKS][4] = {};
    for (int term = 0; term < frame.terms; ++term) {
        const uint4* in = reinterpret_cast<const uint4*>(source.frames + frame.slot[term] * source.slot_bytes);
        for (int q = 0; q < groups; ++q) {
            uint4 value[ROWS_OF_16][2];
            const bool known = q * GROUP + t * UNIT < source.channels;
#pragma unroll
            for (int m = 0; m < ROWS_OF_16; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    value[m][half] = known && place[m][half] >= 0 ? load_streamed(in + place[m][half] + q * 4) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint4* b = reinterpret_cast<const uint4*>(shared.weights[term][q][step][lane]);
                const uint4 b01 = b[0], b23 = b[1];
#pragma unroll
                for (int m = 0; m < ROWS_OF_16; ++m) {
                    const uint4 &lo = value[m][0], &hi = value[m][1];
                    const u32 a[4] = {step ? lo.z : lo.x, step ? hi.z : hi.x, step ? lo.w : lo.y, step ? hi.w : hi.y};
                    mma(acc[m][0], a, b01.x, b01.y);
                    mma(acc[m][1], a, b01.z, b01.w);
                    mma(acc[m][2], a, b23.x, b23.y);
                    mma(acc[m][3], a, b23.z, b23.w);
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < ROWS_OF_16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (m * WARPS + warp) * 16 + half * 8 + lane / 4;
            if (at >= PATCH) continue;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * b + 2 * t + e < TAPS * OUTPUTS) shared.products[at][8 * b + 2 * t + e] = acc[m][b][2 * half + e];
        }
    __syncthreads();

    const int x = tile.x + threadIdx.x % TILE, y = tile.y + threadIdx.x / TILE;
    if (x >= p.width || y >= p.height) return;
    float sum[OUTPUTS] = {};
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const float* products = shared.products[(threadIdx.x / TILE + tap / 3) * SIDE + threadIdx.x % TILE + tap % 3];
#pragma unroll
        for (int c = 0; c < OUTPUTS; ++c) sum[c] += products[tap * OUTPUTS + c];
    }
    Element* out = reinterpret_cast<Element*>(p.out + frame.out * p.out_slot_bytes) + (static_cast<i64>(y) * p.width + x) * p.cout;
    const float* bias = p.bias + static_cast<i64>(frame.bias) * COLUMNS;
#pragma unroll
    for (int c = 0; c < OUTPUTS; ++c)
        if (c < p.cout) out[c] = pack1(sum[c] + __ldg(bias + c));
}
