// Norm, SiLU and 3x3 convolution over three frames of many channels to at most 3. Bound by reading the input once.
// conv_out_pixel.cu compiles it with the norm of pixels: that reads the input twice, first for the lengths of the pixels.
//
// A product with 3 columns would leave the tensor cores idle, and 9 taps would read each pixel 9 times. So the taps
// become columns: each pixel of the patch is multiplied once by 9 taps x 3 outputs = 27 columns (32 with padding), for
// each of the three output frames it contributes to. An output pixel then adds 9 x 3 of these products. Contributions
// to the next two output frames are partial sums, handed from frame to frame and from launch to launch: no earlier
// input is read again.
//
// Pixels go from global memory straight to registers. The order of input channels is free, so a lane loads a unit of
// adjacent ones and the weights are packed to match.
#include "ampere.cuh"
#include "norm.cuh"

// Which norm: that of pixels, or GroupNorm.
#ifdef VVAE_PIXEL_NORM
#define CONV_OUT conv_out_pixel
constexpr bool PIXEL = true;
#else
#define CONV_OUT conv_out
constexpr bool PIXEL = false;
#endif

constexpr int TILE_ROWS_2B = 8;  // 2-byte elements
constexpr int TILE_ROWS_4B = 6;  // 4-byte elements
constexpr int TILE_ROWS = ELEMENT_BYTES == 4 ? TILE_ROWS_4B : TILE_ROWS_2B;
constexpr int TILE_COLS = 16;
constexpr int THREADS = 192;
constexpr int SHARED_BYTES_2B = 88432;
constexpr int SHARED_BYTES_4B = 100288;
constexpr int MAX_CHANNELS = 128;  // input
constexpr int OUTPUTS = 3;         // output channels
constexpr int SPAN = 3;            // output frames that an input frame contributes to
constexpr int PARTIAL_FLOATS = 6;  // partial sums of a pixel
static_assert(PARTIAL_FLOATS == (SPAN - 1) * OUTPUTS);
constexpr int BIAS_CHANNELS = 128;  // padded

constexpr int WARPS = THREADS / 32;
constexpr int PATCH_COLS = TILE_COLS + 2, PATCH_PIXELS = PATCH_COLS * (TILE_ROWS + 2);
constexpr int M_BLOCKS = 2;            // 16 pixels each, of a warp
constexpr int TAPS = 9, N_BLOCKS = 4;  // 8 columns each
constexpr int PITCH = 83;              // floats of a pixel's products; odd, so adjacent pixels use different banks
constexpr int INVERSE_LENGTH = 81;     // behind a pixel's products: 1 / length of its channels
// Channels that the four lanes of a pixel load at once, for two products.
constexpr int GROUP_CHANNELS = 4 * UNIT_CHANNELS;
static_assert(M_BLOCKS * WARPS * 16 >= PATCH_PIXELS);

/// One input frame, with its slabs for the output frame of the same index and the next two.
struct OutFrameParams {
    int slot, slab[SPAN], bias, out;
};

struct OutParams {
    Norm norm;
    const u8* frames;   // slot 0
    const u8* weights;  // [slab], as mma fragments
    const float* bias;  // [bias][BIAS_CHANNELS]
    u8* out;            // slot 0
    // Partial sums [pixel][next frame, the one after][output], or null. Both may be the same memory.
    const float* partial_in;
    float* partial_out;
    i64 slot_bytes, out_slot_bytes;
    int height, width, channels, cout;
    int tiles_x, count;
    OutFrameParams frame[MAX_FRAMES];
};

struct Shared {
    float products[PATCH_PIXELS][PITCH];  // [output frame][tap][output]
    // [output frame][group][product][lane][block, half]
    u32 weights[SPAN][MAX_CHANNELS / GROUP_CHANNELS][2][32][2 * N_BLOCKS];
    float2 norm[MAX_CHANNELS];  // scale and shift
    float partial[PARTIAL_FLOATS][TILE_ROWS * TILE_COLS];
};
static_assert(sizeof(Shared) == (ELEMENT_BYTES == 4 ? SHARED_BYTES_4B : SHARED_BYTES_2B),
              "dynamic shared memory of a launch");

/// Loads a frame's slabs and norm to shared memory; for the norm of pixels, gamma. The slabs of the previous frame are reused where they are the same.
__device__ __forceinline__ void load_weights(Shared& shared, const OutParams& p, int index) {
    const OutFrameParams &frame = p.frame[index], &previous = p.frame[max(index - 1, 0)];
    const int slab_units = (p.channels + GROUP_CHANNELS - 1) / GROUP_CHANNELS * 2 * 32 * 2 * N_BLOCKS / 4;
    for (int k = 0; k < SPAN; ++k) {
        if (index > 0 && frame.slab[k] == previous.slab[k]) continue;
        const uint4* from = reinterpret_cast<const uint4*>(p.weights) + static_cast<i64>(frame.slab[k]) * slab_units;
        for (int i = threadIdx.x; i < slab_units; i += THREADS)
            reinterpret_cast<uint4*>(shared.weights[k])[i] = __ldg(from + i);
    }
    for (int c = threadIdx.x; c < MAX_CHANNELS; c += THREADS) {
        if (PIXEL) shared.norm[c].x = c < p.channels ? __ldg(p.norm.gamma + c) : 0.0f;
        else shared.norm[c] = scale_and_shift(p.norm, frame.slot, c, p.channels);
    }
}

/// Offset of a tile's patch in a frame, in units; it may lie before the frame, because of the halo. Computed for each
/// frame, as registers to hold it would spill: the volatile read keeps the compiler from hoisting it.
__device__ __forceinline__ i64 patch_offset(const OutParams& p) {
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    const int left = block % p.tiles_x * TILE_COLS, top = block / p.tiles_x * TILE_ROWS;
    return (static_cast<i64>(top - 1) * p.width + left - 1) * (p.channels / UNIT_CHANNELS);
}

/// Writes the products of a warp's pixels to shared memory.
__device__ __forceinline__ void store_products(Shared& shared, const float (&acc)[M_BLOCKS][SPAN][N_BLOCKS][4],
                                               int warp, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (m * WARPS + warp) * 16 + half * 8 + lane / 4;
            if (at >= PATCH_PIXELS) continue;
#pragma unroll
            for (int k = 0; k < SPAN; ++k)
#pragma unroll
                for (int b = 0; b < N_BLOCKS; ++b)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int column = 8 * b + 2 * t + e;
                        if (column < TAPS * OUTPUTS)
                            shared.products[at][k * TAPS * OUTPUTS + column] = acc[m][k][b][2 * half + e];
                    }
        }
}

/// Sums the taps of an output pixel, stores it, and updates its partial sums.
__device__ __forceinline__ void finish_pixel(Shared& shared, const OutParams& p, int f, int row, int col, i64 pixel) {
    float sum[SPAN][OUTPUTS] = {};
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const float* products = shared.products[(row + tap / 3) * PATCH_COLS + col + tap % 3] + tap * OUTPUTS;
#pragma unroll
        for (int k = 0; k < SPAN; ++k)
#pragma unroll
            for (int c = 0; c < OUTPUTS; ++c) sum[k][c] += products[k * TAPS * OUTPUTS + c];
    }
    Element* out = reinterpret_cast<Element*>(p.out + p.frame[f].out * p.out_slot_bytes) + pixel * p.cout;
    const float* bias = p.bias + p.frame[f].bias * BIAS_CHANNELS;
#pragma unroll
    for (int c = 0; c < OUTPUTS; ++c) {
        float &next = shared.partial[c][threadIdx.x], &after_next = shared.partial[OUTPUTS + c][threadIdx.x];
        if (c < p.cout) out[c] = pack1(next + sum[0][c] + __ldg(bias + c));
        next = after_next + sum[1][c];
        after_next = sum[2][c];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT_BYTES == 2 ? 2 : 1)
    CONV_OUT(const __grid_constant__ OutParams p) {
    begin_launch();
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int left = blockIdx.x % p.tiles_x * TILE_COLS, top = blockIdx.x / p.tiles_x * TILE_ROWS;
    const int groups = (p.channels + GROUP_CHANNELS - 1) / GROUP_CHANNELS;

    // Offsets of this lane's pixels in the patch, in units; negative outside the image. 32 bits suffice for frames of
    // any size, as a patch spans TILE_ROWS + 2 rows only: width < 2^22 is enough.
    int offset[M_BLOCKS][2];
#pragma unroll
    for (int m = 0; m < M_BLOCKS; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (m * WARPS + warp) * 16 + half * 8 + lane / 4;
            const int x = left - 1 + at % PATCH_COLS, y = top - 1 + at / PATCH_COLS;
            const bool inside = at < PATCH_PIXELS && static_cast<u32>(x) < p.width && static_cast<u32>(y) < p.height;
            const int patch_pixel = at / PATCH_COLS * p.width + at % PATCH_COLS;
            offset[m][half] = inside ? patch_pixel * (p.channels / UNIT_CHANNELS) + t : -1;
        }

    // This thread's pixel of the output.
    const int col = threadIdx.x % TILE_COLS, row = threadIdx.x / TILE_COLS, x = left + col, y = top + row;
    const bool has_pixel = row < TILE_ROWS && x < p.width && y < p.height;
    const i64 pixel = static_cast<i64>(y) * p.width + x;
    if (has_pixel)
#pragma unroll
        for (int i = 0; i < PARTIAL_FLOATS; ++i)
            shared.partial[i][threadIdx.x] = p.partial_in ? p.partial_in[pixel * PARTIAL_FLOATS + i] : 0.0f;

    for (int f = 0; f < p.count; ++f) {
        load_weights(shared, p, f);
        __syncthreads();
        const uint4* in = reinterpret_cast<const uint4*>(p.frames + p.frame[f].slot * p.slot_bytes) + patch_offset(p);
        const auto load = [&](int q, int m, int half) {
            const bool inside = q * GROUP_CHANNELS + t * UNIT_CHANNELS < p.channels && offset[m][half] >= 0;
            return inside ? load_readonly_once(in + offset[m][half] + q * 4) : make_uint4(0, 0, 0, 0);
        };
        const auto inverse_of = [&](int m, int half) -> float& {
            return shared.products[(m * WARPS + warp) * 16 + half * 8 + lane / 4][INVERSE_LENGTH];
        };
        if (PIXEL) {
#pragma unroll
            for (int i = 0; i < 2 * M_BLOCKS; ++i) {
                float sum = 0.0f;
                for (int q = 0; q < groups; ++q) sum = add_squares(load(q, i / 2, i % 2), sum);
                const float inverse = inverse_length(sum, 4);
                if (offset[i / 2][i % 2] >= 0 && t == 0) inverse_of(i / 2, i % 2) = inverse;
            }
            __syncwarp();
        }
        float acc[M_BLOCKS][SPAN][N_BLOCKS][4] = {};
        uint4 next[M_BLOCKS][2];
#pragma unroll
        for (int i = 0; i < 2 * M_BLOCKS; ++i)
            if (!PIXEL) next[i / 2][i % 2] = load(0, i / 2, i % 2);
        for (int q = 0; q < groups; ++q) {
            // Pixels that were read for their lengths are in the caches. Held ahead, they would spill.
#pragma unroll
            for (int i = 0; i < 2 * M_BLOCKS; ++i)
                if (PIXEL) next[i / 2][i % 2] = load(q, i / 2, i % 2);
            UnitNorm norm;
            norm.load(shared.norm + q * GROUP_CHANNELS + t * UNIT_CHANNELS);
            uint4 value[M_BLOCKS][2];
#pragma unroll
            for (int i = 0; i < 2 * M_BLOCKS; ++i) {
                const int m = i / 2, half = i % 2;
                const auto normalised = [&](uint4 unit) {
                    return PIXEL ? normalise_unit<true>(unit, inverse_of(m, half), norm.scale) : norm.apply<true>(unit);
                };
                value[m][half] = offset[m][half] >= 0 ? normalised(next[m][half]) : make_uint4(0, 0, 0, 0);
                if (!PIXEL && q + 1 < groups) next[m][half] = load(q + 1, m, half);
            }
#pragma unroll
            for (int k = 0; k < SPAN; ++k)
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint4* b = reinterpret_cast<const uint4*>(shared.weights[k][q][step][lane]);
                    const uint4 b01 = b[0], b23 = b[1];
#pragma unroll
                    for (int m = 0; m < M_BLOCKS; ++m) {
                        const uint4 &lo = value[m][0], &hi = value[m][1];
                        const u32 a[4] = {step ? lo.z : lo.x, step ? hi.z : hi.x, step ? lo.w : lo.y,
                                          step ? hi.w : hi.y};
                        mma(acc[m][k][0], a, b01.x, b01.y);
                        mma(acc[m][k][1], a, b01.z, b01.w);
                        mma(acc[m][k][2], a, b23.x, b23.y);
                        mma(acc[m][k][3], a, b23.z, b23.w);
                    }
                }
        }
        store_products(shared, acc, warp, lane);
        __syncthreads();

        if (has_pixel) finish_pixel(shared, p, f, row, col, pixel);
        __syncthreads();
    }

    if (has_pixel && p.partial_out)
#pragma unroll
        for (int i = 0; i < PARTIAL_FLOATS; ++i)
            p.partial_out[pixel * PARTIAL_FLOATS + i] = shared.partial[i][threadIdx.x];
}
