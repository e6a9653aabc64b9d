// Norm, SiLU and 3x3 convolution over three frames of many channels to at most 3: bound by reading the input once.
//
// A matrix product with 3 columns would leave the tensor cores idle, and 9 taps would read each pixel 9 times. So the
// taps become columns: every pixel of the patch is multiplied once by 9 taps x 3 outputs = 27 columns (32 with
// padding) for each of the three output frames that it is a part of, and an output pixel then adds up 9 x 3 of these
// products, its neighbours' and its own. What a frame adds to the next two output frames is carried on, from frame to frame and
// from launch to launch. So no frame of the past is ever read again.
// Pixels go from global memory straight into registers: the order of input channels is free, so a lane takes a unit of
// neighbouring ones and the weights are packed to match.
#include "ampere.cuh"
#include "norm.cuh"

constexpr int COLS = 16, ROWS = ELEMENT == 2 ? 8 : 6, SIDE = COLS + 2, PATCH = SIDE * (ROWS + 2);
constexpr int WARPS = 6, THREADS = 32 * WARPS;
constexpr int ROWS_OF_16 = 2;                  // of a warp: 6 * 2 * 16 >= 180
constexpr int OUTPUTS = 3, TAPS = 9, BLOCKS = 4;  // blocks of 8 columns
constexpr int ONWARD = 3;                      // output frames that an input frame is a part of
constexpr int CARRIED = (ONWARD - 1) * OUTPUTS;
constexpr int PITCH = 83;                      // floats of a pixel's products; odd, so neighbours lie in other banks
constexpr int MAX_CHANNELS = 128, MAX_FRAMES = 32;
constexpr int GROUP = 4 * UNIT;                // channels that the four lanes of a pixel load at once, for two products

/// One input frame, with its slabs for the output frame of the same number and for the next two.
struct OutFrame {
    int slot, slab[ONWARD], bias, out;
};

struct OutParams {
    Norm norm;
    const u8* frames;     // slot 0
    const u8* weights;    // [slab], as mma fragments
    const float* bias;    // [bias][128]
    u8* out;              // slot 0
    const float* before;  // [pixel][next, the one after][output]: what earlier frames add; null: nothing
    float* after;         // the same with these frames; null: nobody wants it. May be the same place
    i64 slot_bytes, out_slot_bytes;
    int height, width, channels, cout;
    int tiles_x, count;
    OutFrame frame[MAX_FRAMES];
};

struct Shared {
    float products[PATCH][PITCH];                                  // [onward][tap][output]
    u32 weights[ONWARD][MAX_CHANNELS / GROUP][2][32][2 * BLOCKS];  // [onward][group][product][lane][block, half]
    float2 norm[MAX_CHANNELS];                                     // scale and shift
    float carry[CARRIED][ROWS * COLS];  // what earlier frames add to the next output frame, and to the one after
};

/// Brings the slabs of a frame and its norm to shared memory, where those of the frame before are read no more.
__device__ __forceinline__ void prepare(Shared& shared, const OutParams& p, int at) {
    const OutFrame &frame = p.frame[at], &last = p.frame[max(at - 1, 0)];
    const int slab_units = (p.channels + GROUP - 1) / GROUP * 2 * 32 * 2 * BLOCKS / 4;
    for (int k = 0; k < ONWARD; ++k) {
        if (at > 0 && frame.slab[k] == last.slab[k]) continue;
        const uint4* from = reinterpret_cast<const uint4*>(p.weights) + static_cast<i64>(frame.slab[k]) * slab_units;
        for (int i = threadIdx.x; i < slab_units; i += THREADS) reinterpret_cast<uint4*>(shared.weights[k])[i] = __ldg(from + i);
    }
    for (int c = threadIdx.x; c < MAX_CHANNELS; c += THREADS)
        shared.norm[c] = scale_and_shift(p.norm, frame.slot, c, p.channels);
}

extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT == 2 ? 2 : 1) conv_out(const __grid_constant__ OutParams p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int left = blockIdx.x % p.tiles_x * COLS, top = blockIdx.x / p.tiles_x * ROWS;
    const int groups = (p.channels + GROUP - 1) / GROUP;

    // Where this lane's pixels lie in a frame, in units of 16 bytes; negative outside the image.
    int place[ROWS_OF_16][2];
#pragma unroll
    for (int m = 0; m < ROWS_OF_16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (m * WARPS + warp) * 16 + half * 8 + lane / 4;
            const int x = left - 1 + at % SIDE, y = top - 1 + at / SIDE;
            const bool inside = at < PATCH && static_cast<u32>(x) < p.width && static_cast<u32>(y) < p.height;
            place[m][half] = inside ? (y * p.width + x) * (p.channels / UNIT) + t : -1;
        }

    // This thread's pixel of the output.
    const int col = threadIdx.x % COLS, row = threadIdx.x / COLS, x = left + col, y = top + row;
    const bool mine = row < ROWS && x < p.width && y < p.height;
    const i64 pixel = static_cast<i64>(y) * p.width + x;
    if (mine)
#pragma unroll
        for (int i = 0; i < CARRIED; ++i) shared.carry[i][threadIdx.x] = p.before ? p.before[pixel * CARRIED + i] : 0.0f;

    for (int f = 0; f < p.count; ++f) {
        prepare(shared, p, f);
        __syncthreads();
        const uint4* in = reinterpret_cast<const uint4*>(p.frames + p.frame[f].slot * p.slot_bytes);
        const auto load = [&](int q, int m, int half) {
            const bool there = q * GROUP + t * UNIT < p.channels && place[m][half] >= 0;
            return there ? load_streamed(in + place[m][half] + q * 4) : make_uint4(0, 0, 0, 0);
        };
        float acc[ROWS_OF_16][ONWARD][BLOCKS][4] = {};
        uint4 next[ROWS_OF_16][2];
#pragma unroll
        for (int i = 0; i < 2 * ROWS_OF_16; ++i) next[i / 2][i % 2] = load(0, i / 2, i % 2);
        for (int q = 0; q < groups; ++q) {
            UnitNorm norm;
            norm.load(shared.norm + q * GROUP + t * UNIT);
            uint4 value[ROWS_OF_16][2];
#pragma unroll
            for (int i = 0; i < 2 * ROWS_OF_16; ++i) {
                const int m = i / 2, half = i % 2;
                value[m][half] = place[m][half] >= 0 ? norm.apply<true>(next[m][half]) : make_uint4(0, 0, 0, 0);
                if (q + 1 < groups) next[m][half] = load(q + 1, m, half);
            }
#pragma unroll
            for (int k = 0; k < ONWARD; ++k)
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint4* b = reinterpret_cast<const uint4*>(shared.weights[k][q][step][lane]);
                    const uint4 b01 = b[0], b23 = b[1];
#pragma unroll
                    for (int m = 0; m < ROWS_OF_16; ++m) {
                        const uint4 &lo = value[m][0], &hi = value[m][1];
                        const u32 a[4] = {step ? lo.z : lo.x, step ? hi.z : hi.x, step ? lo.w : lo.y, step ? hi.w : hi.y};
                        mma(acc[m][k][0], a, b01.x, b01.y);
                        mma(acc[m][k][1], a, b01.z, b01.w);
                        mma(acc[m][k][2], a, b23.x, b23.y);
                        mma(acc[m][k][3], a, b23.z, b23.w);
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
                for (int k = 0; k < ONWARD; ++k)
#pragma unroll
                    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int column = 8 * b + 2 * t + e;
                            if (column < TAPS * OUTPUTS)
                                shared.products[at][k * TAPS * OUTPUTS + column] = acc[m][k][b][2 * half + e];
                        }
            }
        __syncthreads();

        if (mine) {
            float sum[ONWARD][OUTPUTS] = {};
#pragma unroll
            for (int tap = 0; tap < TAPS; ++tap) {
                const float* products = shared.products[(row + tap / 3) * SIDE + col + tap % 3] + tap * OUTPUTS;
#pragma unroll
                for (int k = 0; k < ONWARD; ++k)
#pragma unroll
                    for (int c = 0; c < OUTPUTS; ++c) sum[k][c] += products[k * TAPS * OUTPUTS + c];
            }
            Element* out = reinterpret_cast<Element*>(p.out + p.frame[f].out * p.out_slot_bytes) + pixel * p.cout;
            const float* bias = p.bias + p.frame[f].bias * 128;
#pragma unroll
            for (int c = 0; c < OUTPUTS; ++c) {
                float &next = shared.carry[c][threadIdx.x], &after_next = shared.carry[OUTPUTS + c][threadIdx.x];
                if (c < p.cout) out[c] = pack1(next + sum[0][c] + __ldg(bias + c));
                next = after_next + sum[1][c];
                after_next = sum[2][c];
            }
        }
        __syncthreads();
    }

    if (mine && p.after)
#pragma unroll
        for (int i = 0; i < CARRIED; ++i) p.after[pixel * CARRIED + i] = shared.carry[i][threadIdx.x];
}
