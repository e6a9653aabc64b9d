// Norm, SiLU and 3x3 convolution over three frames of many channels to at most 3. Bound by reading the input once.
// conv_out_pixel.cu compiles it with the norm of pixels: that reads the input twice, first for the lengths of the
// pixels. conv_out_alone is for output frames that see one input frame each: a third of the products, the same bits.
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
#define CONV_OUT_ALONE conv_out_pixel_alone
constexpr bool PIXEL = true;
#else
#define CONV_OUT conv_out
#define CONV_OUT_ALONE conv_out_alone
constexpr bool PIXEL = false;
#endif

constexpr int TILE_ROWS_2B = 8;  // 2-byte elements
constexpr int TILE_ROWS_4B = 6;  // 4-byte elements
constexpr int TILE_ROWS = ELEMENT_BYTES == 4 ? TILE_ROWS_4B : TILE_ROWS_2B;
constexpr int TILE_COLS = 16;
constexpr int THREADS = 192;
constexpr int ALONE_THREADS = 384;
constexpr int ALONE_BLOCKS_PER_SM = 2;
constexpr int SHARED_BYTES_2B = 88432;
constexpr int SHARED_BYTES_4B = 100288;
constexpr int ALONE_SHARED_BYTES_2B = 30096;
constexpr int ALONE_SHARED_BYTES_4B = 34112;
constexpr int MAX_CHANNELS = 128;  // input
constexpr int OUTPUTS = 3;         // output channels
constexpr int MAX_SPAN = 3;        // output frames that an input frame contributes to
constexpr int PARTIAL_FLOATS = 6;  // partial sums of a pixel
static_assert(PARTIAL_FLOATS == (MAX_SPAN - 1) * OUTPUTS);
constexpr int BIAS_CHANNELS = 128;  // padded

constexpr int PATCH_COLS = TILE_COLS + 2, PATCH_PIXELS = PATCH_COLS * (TILE_ROWS + 2);
constexpr int PIXEL_BLOCKS = 12;  // 16 pixels each
constexpr int TAPS = 9, N_BLOCKS = 4;  // 8 columns each
// Floats of a pixel's products, which 1 / length of its channels follows. The pitch is odd, so adjacent pixels use
// different banks.
constexpr __host__ __device__ int products_of(int span) { return span * TAPS * OUTPUTS; }
constexpr __host__ __device__ int pitch_of(int span) { return products_of(span) + 2; }
// Channels that the four lanes of a pixel load at once, for two products.
constexpr int GROUP_CHANNELS = 4 * UNIT_CHANNELS;
static_assert(PIXEL_BLOCKS * 16 >= PATCH_PIXELS);

/// How the blocks of pixels are divided. With the products of three output frames a warp has registers for two blocks,
/// and each multiprocessor for 12 warps. Those of one frame leave registers for 24.
template <int SPAN>
struct Warps {
    static constexpr int COUNT = (SPAN == 1 ? ALONE_THREADS : THREADS) / 32, M_BLOCKS = PIXEL_BLOCKS / COUNT;
};

/// One input frame, with its slabs for the output frame of the same index and the next two.
struct OutFrameParams {
    int slot, slab[MAX_SPAN], bias, out;
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

template <int SPAN>
struct Shared {
    float products[PATCH_PIXELS][pitch_of(SPAN)];  // [output frame][tap][output]
    // [output frame][group][product][lane][block, half]
    u32 weights[SPAN][MAX_CHANNELS / GROUP_CHANNELS][2][32][2 * N_BLOCKS];
    float2 norm[MAX_CHANNELS];  // scale and shift
};

/// The sums of a tile's pixels that wait for later frames.
struct PartialSums {
    float of[PARTIAL_FLOATS][TILE_ROWS * TILE_COLS];
};

constexpr int SHARED_BYTES = ELEMENT_BYTES == 4 ? SHARED_BYTES_4B : SHARED_BYTES_2B;
constexpr int ALONE_SHARED_BYTES = ELEMENT_BYTES == 4 ? ALONE_SHARED_BYTES_4B : ALONE_SHARED_BYTES_2B;
static_assert(sizeof(Shared<MAX_SPAN>) + sizeof(PartialSums) == SHARED_BYTES, "dynamic shared memory of a launch");
static_assert(sizeof(Shared<1>) == ALONE_SHARED_BYTES, "dynamic shared memory of a launch");

/// Loads a frame's slabs and norm to shared memory; for the norm of pixels, gamma. Slabs of the previous
/// frame are reused where they are the same.
template <int SPAN>
__device__ __forceinline__ void load_weights(Shared<SPAN>& shared, const OutParams& p, int index) {
    const OutFrameParams &frame = p.frame[index], &previous = p.frame[max(index - 1, 0)];
    const int slab_units = (p.channels + GROUP_CHANNELS - 1) / GROUP_CHANNELS * 2 * 32 * 2 * N_BLOCKS / 4;
    for (int k = 0; k < SPAN; ++k) {
        if (SPAN > 1 && index > 0 && frame.slab[k] == previous.slab[k]) continue;
        const uint4* from = reinterpret_cast<const uint4*>(p.weights) + static_cast<i64>(frame.slab[k]) * slab_units;
        for (int i = threadIdx.x; i < slab_units; i += 32 * Warps<SPAN>::COUNT)
            reinterpret_cast<uint4*>(shared.weights[k])[i] = __ldg(from + i);
    }
    for (int c = threadIdx.x; c < MAX_CHANNELS; c += 32 * Warps<SPAN>::COUNT) {
        if (PIXEL) shared.norm[c].x = c < p.channels ? __ldg(p.norm.gamma + c) : 0.0f;
        else shared.norm[c] = scale_and_shift(p.norm, frame.slot, c, p.channels);
    }
}

/// Offset of a tile's patch in a frame, in units; it may lie before the frame, because of the halo.
__device__ __forceinline__ i64 patch_offset(const OutParams& p, u32 tile) {
    const int left = tile % p.tiles_x * TILE_COLS, top = tile / p.tiles_x * TILE_ROWS;
    return (static_cast<i64>(top - 1) * p.width + left - 1) * (p.channels / UNIT_CHANNELS);
}

/// The tile of a block that has one. The volatile read keeps the compiler from hoisting what is computed from it:
/// registers to hold that would spill.
__device__ __forceinline__ u32 block_tile() {
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

/// A thread's pixel of the output.
struct OutputPixel {
    int row, col;  // in the tile
    bool inside;   // the image
    i64 index;
};

__device__ __forceinline__ OutputPixel output_pixel(const OutParams& p, u32 tile) {
    const int col = threadIdx.x % TILE_COLS, row = threadIdx.x / TILE_COLS;
    const int x = tile % p.tiles_x * TILE_COLS + col, y = tile / p.tiles_x * TILE_ROWS + row;
    return {row, col, row < TILE_ROWS && x < p.width && y < p.height, static_cast<i64>(y) * p.width + x};
}

/// Writes the products of a warp's pixels to shared memory.
template <int SPAN>
__device__ __forceinline__ void store_products(Shared<SPAN>& shared,
                                               const float (&acc)[Warps<SPAN>::M_BLOCKS][SPAN][N_BLOCKS][4], int warp,
                                               int lane) {
    constexpr int M_BLOCKS = Warps<SPAN>::M_BLOCKS, WARPS = Warps<SPAN>::COUNT;
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
template <int SPAN>
__device__ __forceinline__ void finish_pixel(const Shared<SPAN>& shared, PartialSums* partial, const OutParams& p,
                                             int f, const OutputPixel& pixel) {
    float sum[SPAN][OUTPUTS] = {};
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const int at = (pixel.row + tap / 3) * PATCH_COLS + pixel.col + tap % 3;
        const float* products = shared.products[at] + tap * OUTPUTS;
#pragma unroll
        for (int k = 0; k < SPAN; ++k)
#pragma unroll
            for (int c = 0; c < OUTPUTS; ++c) sum[k][c] += products[k * TAPS * OUTPUTS + c];
    }
    Element* out = reinterpret_cast<Element*>(p.out + p.frame[f].out * p.out_slot_bytes) + pixel.index * p.cout;
    const float* bias = p.bias + p.frame[f].bias * BIAS_CHANNELS;
#pragma unroll
    for (int c = 0; c < OUTPUTS; ++c) {
        const float before = SPAN == 1 ? 0.0f : partial->of[c][threadIdx.x];
        if (c < p.cout) out[c] = pack1(before + sum[0][c] + __ldg(bias + c));
        if (SPAN == MAX_SPAN) {
            float &next = partial->of[c][threadIdx.x], &after_next = partial->of[OUTPUTS + c][threadIdx.x];
            next = after_next + sum[SPAN - 2][c];
            after_next = sum[SPAN - 1][c];
        }
    }
}

/// A warp's pixels of a patch: offsets in it, in units; negative outside the image. 32 bits suffice for frames of any
/// size, as a patch spans TILE_ROWS + 2 rows only: width < 2^22 is enough.
template <int SPAN>
struct PatchPixels {
    int offset[Warps<SPAN>::M_BLOCKS][2];

    __device__ __forceinline__ PatchPixels(const OutParams& p, u32 tile, int warp, int lane) {
        const int left = tile % p.tiles_x * TILE_COLS, top = tile / p.tiles_x * TILE_ROWS;
#pragma unroll
        for (int m = 0; m < Warps<SPAN>::M_BLOCKS; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = (m * Warps<SPAN>::COUNT + warp) * 16 + half * 8 + lane / 4;
                const int x = left - 1 + at % PATCH_COLS, y = top - 1 + at / PATCH_COLS;
                const bool inside =
                    at < PATCH_PIXELS && static_cast<u32>(x) < p.width && static_cast<u32>(y) < p.height;
                const int patch_pixel = at / PATCH_COLS * p.width + at % PATCH_COLS;
                offset[m][half] = inside ? patch_pixel * (p.channels / UNIT_CHANNELS) + (lane & 3) : -1;
            }
    }
};

/// Normalises a warp's pixels of a patch of frame `f` and multiplies them by all taps.
template <int SPAN>
__device__ __forceinline__ void multiply(Shared<SPAN>& shared, const OutParams& p, int f, u32 tile,
                                         const PatchPixels<SPAN>& pixels,
                                         float (&acc)[Warps<SPAN>::M_BLOCKS][SPAN][N_BLOCKS][4]) {
    constexpr int M_BLOCKS = Warps<SPAN>::M_BLOCKS, WARPS = Warps<SPAN>::COUNT;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int groups = (p.channels + GROUP_CHANNELS - 1) / GROUP_CHANNELS;
    const auto& offset = pixels.offset;
    const uint4* in = reinterpret_cast<const uint4*>(p.frames + p.frame[f].slot * p.slot_bytes) + patch_offset(p, tile);
    const auto load = [&](int q, int m, int half) {
        const bool inside = q * GROUP_CHANNELS + t * UNIT_CHANNELS < p.channels && offset[m][half] >= 0;
        return inside ? load_readonly_once(in + offset[m][half] + q * 4) : make_uint4(0, 0, 0, 0);
    };
    const auto inverse_of = [&](int m, int half) -> float& {
        return shared.products[(m * WARPS + warp) * 16 + half * 8 + lane / 4][products_of(SPAN)];
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
                    const u32 a[4] = {step ? lo.z : lo.x, step ? hi.z : hi.x, step ? lo.w : lo.y, step ? hi.w : hi.y};
                    mma(acc[m][k][0], a, b01.x, b01.y);
                    mma(acc[m][k][1], a, b01.z, b01.w);
                    mma(acc[m][k][2], a, b23.x, b23.y);
                    mma(acc[m][k][3], a, b23.z, b23.w);
                }
            }
    }
}

/// All frames of the launch in order, of one tile.
extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT_BYTES == 2 ? 2 : 1)
    CONV_OUT(const __grid_constant__ OutParams p) {
    extern __shared__ __align__(16) u8 memory[];
    auto& shared = *reinterpret_cast<Shared<MAX_SPAN>*>(memory);
    auto& partial = *reinterpret_cast<PartialSums*>(memory + sizeof(shared));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const PatchPixels<MAX_SPAN> pixels(p, blockIdx.x, warp, lane);
    const OutputPixel pixel = output_pixel(p, blockIdx.x);
    if (pixel.inside)
#pragma unroll
        for (int i = 0; i < PARTIAL_FLOATS; ++i)
            partial.of[i][threadIdx.x] = p.partial_in ? p.partial_in[pixel.index * PARTIAL_FLOATS + i] : 0.0f;

    for (int f = 0; f < p.count; ++f) {
        load_weights(shared, p, f);
        __syncthreads();
        float acc[Warps<MAX_SPAN>::M_BLOCKS][MAX_SPAN][N_BLOCKS][4] = {};
        multiply(shared, p, f, block_tile(), pixels, acc);
        store_products(shared, acc, warp, lane);
        __syncthreads();
        if (pixel.inside) finish_pixel(shared, &partial, p, f, pixel);
        __syncthreads();
    }

    if (pixel.inside && p.partial_out)
#pragma unroll
        for (int i = 0; i < PARTIAL_FLOATS; ++i)
            p.partial_out[pixel.index * PARTIAL_FLOATS + i] = partial.of[i][threadIdx.x];
}

/// Tiles of one frame in turn. While some warps sum the taps of a tile, others begin with the next.
extern "C" __global__ void __launch_bounds__(ALONE_THREADS, ALONE_BLOCKS_PER_SM)
    CONV_OUT_ALONE(const __grid_constant__ OutParams p) {
    extern __shared__ __align__(16) u8 memory[];
    auto& shared = *reinterpret_cast<Shared<1>*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, f = blockIdx.y;
    load_weights(shared, p, f);
    __syncthreads();
    const u32 tiles = p.tiles_x * ((p.height + TILE_ROWS - 1) / TILE_ROWS);
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float acc[Warps<1>::M_BLOCKS][1][N_BLOCKS][4] = {};
        multiply(shared, p, f, tile, PatchPixels<1>(p, tile, warp, lane), acc);
        __syncthreads();  // The products of the last tile are summed.
        store_products(shared, acc, warp, lane);
        __syncthreads();
        const OutputPixel pixel = output_pixel(p, tile);
        if (pixel.inside) finish_pixel(shared, nullptr, p, f, pixel);
    }
}
