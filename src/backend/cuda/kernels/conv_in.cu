// 3x3 convolution of 4 input channels (pixels; the fourth is zero padding) to many. Bound by writing the output.
//
// All taps of all terms form one short inner dimension: 27 taps x 4 channels, padded to 112. conv_in_alone is for
// frames of one term each, 9 taps x 4 channels, padded to 48: it leaves out products with zeros, so the bits are the
// same. The patch is in shared memory with 4 channels a pixel, so a lane's part of the inner dimension is one 4-byte
// load. A block loads weights and patch for a whole run of adjacent tiles. After that no warp waits for another, and
// stores overlap with products.
//
// Output channels are assigned to product columns so that a lane's columns are adjacent channels: it stores whole units
// without a shuffle.
//
// conv_in_norm and conv_in_silu apply the next layer's norm, where its statistics are known. They match norm_apply and
// norm_silu bit for bit.
#include "ampere.cuh"
#include "epilogue.cuh"

constexpr int TILE_ROWS = 8;
constexpr int TILE_COLS = 16;
constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 2;
constexpr int ALONE_BLOCKS_PER_SM = 3;
constexpr int MAX_RUN_2B = 8;  // tiles of a block: 2-byte elements
constexpr int MAX_RUN_4B = 4;  // 4-byte elements
constexpr int MAX_RUN = ELEMENT_BYTES == 4 ? MAX_RUN_4B : MAX_RUN_2B;
constexpr int SHARED_BYTES_2B = 77664;
constexpr int SHARED_BYTES_4B = 98752;
constexpr int ALONE_SHARED_BYTES_2B = 39200;
constexpr int ALONE_SHARED_BYTES_4B = 44864;

// A warp computes 32 channels of two row pairs, one pair per pass.
constexpr int WARPS = THREADS / 32;
constexpr int WARP_CHANNELS = 32, BLOCKS = WARP_CHANNELS / 8;
constexpr int PAIR_ROWS = 2, ROW_PAIRS = TILE_ROWS / PAIR_ROWS;
constexpr int PASSES = ROW_PAIRS * (TILE_CHANNELS / WARP_CHANNELS) / WARPS;
// Of a lane and pixel: blocks that make a unit, and units.
constexpr int UNIT_BLOCKS = UNIT_CHANNELS / 2, UNITS = BLOCKS / UNIT_BLOCKS;
constexpr int PIXEL_BYTES = 4 * ELEMENT_BYTES;  // a pixel, and the weights of a tap
constexpr int ALL_TERMS = 3, TAPS = 9;  // of a frame of any layer
constexpr int STEP_TAPS = K_STEP_BYTES / PIXEL_BYTES;
// Pixels of a patch row. With 2-byte elements, lanes read two taps at once, at times the last of a row and the first of
// the next: the pitch puts these 64 bytes apart modulo all banks. With 4-byte elements they read one tap.
constexpr int PITCH = MAX_RUN * TILE_COLS + (ELEMENT_BYTES == 2 ? 10 : 2);
constexpr int PATCH_PIXELS = (TILE_ROWS + 2) * PITCH;

/// The inner dimension of frames with up to TERMS terms.
template <int TERMS>
struct Inner {
    static constexpr int PADDED_TAPS = (TERMS * TAPS + 3) / 4 * 4, K_STEPS = PADDED_TAPS / STEP_TAPS;
    // In elements. An odd number of units avoids bank conflicts of ldmatrix.
    static constexpr int WEIGHT_PITCH = PADDED_TAPS * 4 + UNIT_CHANNELS;
    // K steps with weights in registers. With 4-byte elements there are too few registers. Few terms leave registers
    // for a third block instead.
    static constexpr int HELD_STEPS = ELEMENT_BYTES == 2 && TERMS > 1 ? K_STEPS : 0, HELD = HELD_STEPS ? HELD_STEPS : 1;
    static constexpr int UNROLLED_STEPS = ELEMENT_BYTES == 2 ? K_STEPS : 1;
};

template <int TERMS>
struct Shared {
    Element weights[TILE_CHANNELS][Inner<TERMS>::WEIGHT_PITCH];
    u8 patch[TERMS][PATCH_PIXELS][PIXEL_BYTES];
    alignas(16) float2 norm[TILE_CHANNELS];  // scale and shift
    float bias[TILE_CHANNELS];
    WarpMoments<TILE_CHANNELS / 4> moments[MAX_RUN][ROW_PAIRS];
};
static_assert(sizeof(Shared<ALL_TERMS>) == (ELEMENT_BYTES == 4 ? SHARED_BYTES_4B : SHARED_BYTES_2B),
              "dynamic shared memory of a launch");
static_assert(sizeof(Shared<1>) == (ELEMENT_BYTES == 4 ? ALONE_SHARED_BYTES_4B : ALONE_SHARED_BYTES_2B),
              "dynamic shared memory of a launch");

enum class Output { PLAIN, NORM, NORM_SILU };

/// 4 channels to shared memory; zeros if not `valid`.
__device__ __forceinline__ void cp_async_pixel(void* to, const void* from, bool valid) {
    if (PIXEL_BYTES == 8) cp_async_8(smem_address(to), from, valid);
    else cp_async_16(smem_address(to), from, valid);
}

/// The first channel of a lane's pair of columns in a block, within the warp. Bits from the highest: unit, lane of the
/// four of a pixel, block of the unit.
__device__ __forceinline__ int channel_of(int block, int t) {
    return (block / UNIT_BLOCKS * 4 + t) * UNIT_CHANNELS + block % UNIT_BLOCKS * 2;
}

/// The product column of a channel, within a channel tile. Inverse of `channel_of`.
__device__ __forceinline__ u32 column_of(u32 channel) {
    const u32 block = channel % WARP_CHANNELS / (4 * UNIT_CHANNELS) * UNIT_BLOCKS + channel % UNIT_CHANNELS / 2;
    return channel / WARP_CHANNELS * WARP_CHANNELS + block * 8 + channel / UNIT_CHANNELS % 4 * 2 + channel % 2;
}

/// Loads the weights of the frame's terms; zeros for missing terms. Packed slabs are [channel][tap][4 input channels].
template <int TERMS>
__device__ __forceinline__ void load_weights(const ConvParams& p, const FrameParams& frame, int channel_tile,
                                             Shared<TERMS>& shared) {
    const u8* slab[TERMS];
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        const i64 tile = static_cast<i64>(term < frame.terms ? frame.slab[term] : 0) * p.channel_tiles + channel_tile;
        slab[term] = p.source[0].weights + tile * TILE_CHANNELS * TAPS * PIXEL_BYTES;
    }
    for (u32 i = threadIdx.x; i < TILE_CHANNELS * TAPS; i += THREADS) {
        Element* to = shared.weights[column_of(i / TAPS)] + i % TAPS * 4;
#pragma unroll
        for (int term = 0; term < TERMS; ++term)
            cp_async_pixel(to + term * TAPS * 4, slab[term] + i * PIXEL_BYTES, term < frame.terms);
    }
    for (int tap = TERMS * TAPS; tap < Inner<TERMS>::PADDED_TAPS; ++tap)
        if (threadIdx.x < TILE_CHANNELS)
            cp_async_pixel(&shared.weights[threadIdx.x][tap * 4], p.source[0].weights, false);
}

/// Loads a patch of each term's frame for `tiles` tiles; zeros outside the image and for missing terms.
template <int TERMS>
__device__ __forceinline__ void load_patch(const ConvParams& p, const FrameParams& frame, int x0, int y0, int tiles,
                                           Shared<TERMS>& shared) {
    const FramePart& part = p.part[MAIN];
    const int height = p.source[0].height;
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < TERMS * (TILE_ROWS + 2); i += WARPS) {
        const int term = i / (TILE_ROWS + 2), row = i % (TILE_ROWS + 2), y = y0 - 1 + row;
        const bool has_row = term < frame.terms && static_cast<u32>(y) < height;
        const i64 first =
            has_row ? frame.slot[term] * part.slot_bytes + static_cast<i64>(y) * part.width * PIXEL_BYTES : 0;
        const u8* from = part.frames + first;
        for (int col = lane; col < tiles * TILE_COLS + 2; col += 32) {
            const int x = x0 - 1 + col;
            const bool valid = has_row && static_cast<u32>(x) < part.width;
            cp_async_pixel(shared.patch[term][row * PITCH + col], from + (valid ? x : 0) * PIXEL_BYTES, valid);
        }
    }
}

/// Byte offset of a tap in the patch. Padding taps have zero weights and read where the first taps do.
constexpr __host__ __device__ int tap_offset(int tap, int terms) {
    return (tap % (terms * TAPS) / TAPS * PATCH_PIXELS + tap % TAPS / 3 * PITCH + tap % 3) * PIXEL_BYTES;
}

/// Adds the products of 2 x 16 pixels and a warp's channels. `patch`: the lane's address under the first tap.
template <int TERMS>
__device__ __forceinline__ void multiply(float (&acc)[PAIR_ROWS][BLOCKS][4], u32 patch, int lane_tap,
                                         const u32 (&held)[Inner<TERMS>::HELD][BLOCKS / 2][4], u32 weights) {
    constexpr int K_STEPS = Inner<TERMS>::K_STEPS, HELD_STEPS = Inner<TERMS>::HELD_STEPS;
#pragma unroll(Inner<TERMS>::UNROLLED_STEPS)
    for (int step = 0; step < K_STEPS; ++step) {
        u32 b[BLOCKS / 2][4];
#pragma unroll
        for (int n = 0; n < BLOCKS / 2; ++n) {
            if (step < HELD_STEPS) {
#pragma unroll
                for (int k = 0; k < 4; ++k) b[n][k] = held[step][n][k];
            } else {
                ldmatrix_x4(b[n], weights + n * 16 * Inner<TERMS>::WEIGHT_PITCH * ELEMENT_BYTES + step * K_STEP_BYTES);
            }
        }
        // This lane's 4 bytes of the lower and upper 16 of the step. Adjacent lanes may read two taps. Few distances
        // occur between these, and each takes one register for all products.
        u32 taps[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = STEP_TAPS * step + STEP_TAPS / 2 * half, last = first + STEP_TAPS / 2 - 1;
            const int offset = tap_offset(first, TERMS), distance = tap_offset(last, TERMS) - offset;
            taps[half] = patch + lane_tap * distance + offset;
        }
#pragma unroll
        for (int m = 0; m < PAIR_ROWS; ++m) {
            u32 a[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) a[k] = load_shared_u32(taps[k / 2] + (m * PITCH + k % 2 * 8) * PIXEL_BYTES);
#pragma unroll
            for (int n = 0; n < BLOCKS; ++n) mma(acc[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
}

/// Normalises rounded pairs, as a separate norm pass would. `norm`: scale and shift of the warp's channels.
template <bool SILU>
__device__ __forceinline__ void normalise_pairs(Pair (&x)[BLOCKS], const float2* norm, int t) {
    float value[2 * BLOCKS], scale[2 * BLOCKS], shift[2 * BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const float4 both = load_shared_float4(smem_address(norm + channel_of(b, t)));
        scale[2 * b] = both.x, shift[2 * b] = both.y, scale[2 * b + 1] = both.z, shift[2 * b + 1] = both.w;
        const float2 pair = unpack2(x[b]);
        value[2 * b] = pair.x, value[2 * b + 1] = pair.y;
    }
    normalise<SILU>(value, scale, shift);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) x[b] = pack2(value[2 * b], value[2 * b + 1]);
}

__device__ __forceinline__ uint4 unit_of(const Pair (&x)[BLOCKS], int unit) {
#ifdef VVAE_FP32
    const float2 low = x[2 * unit], high = x[2 * unit + 1];
    return make_uint4(__float_as_uint(low.x), __float_as_uint(low.y), __float_as_uint(high.x), __float_as_uint(high.y));
#else
    return make_uint4(x[0], x[1], x[2], x[3]);
#endif
}

template <int TERMS, Output OUTPUT>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared<TERMS>& shared = *reinterpret_cast<Shared<TERMS>*>(memory);
    constexpr int WEIGHT_PITCH = Inner<TERMS>::WEIGHT_PITCH, HELD_STEPS = Inner<TERMS>::HELD_STEPS;
    constexpr int SIDE_WARPS = TILE_CHANNELS / WARP_CHANNELS;  // warps that cover all channels
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int warp_channel = warp % SIDE_WARPS * WARP_CHANNELS, first_pair = warp / SIDE_WARPS * PASSES;
    const int runs = (p.tiles_x + p.run - 1) / p.run;
    int index = blockIdx.x;
    const int channel_tile = index % p.channel_tiles;
    index /= p.channel_tiles;
    const int first_tile = index % runs * p.run, tiles = min(p.run, p.tiles_x - first_tile);
    index /= runs;
    const int y = p.first_row + index % p.tiles_y * TILE_ROWS, frame_index = index / p.tiles_y;
    const FrameParams& frame = p.frame[frame_index];

    load_weights(p, frame, channel_tile, shared);
    load_patch(p, frame, first_tile * TILE_COLS, y, tiles, shared);
    cp_async_commit();
    if (OUTPUT != Output::PLAIN && threadIdx.x < TILE_CHANNELS)
        shared.norm[threadIdx.x] =
            scale_and_shift(p.norm, p.statistics[frame_index], channel_tile * TILE_CHANNELS + threadIdx.x, p.cout);
    Tile tile;
    tile.channel_tile = channel_tile, tile.phase = 0, tile.frame = frame_index, tile.y = y;
    if (threadIdx.x < TILE_CHANNELS)
        shared.bias[threadIdx.x] = bias_of(p, p.frame[tile.frame], tile, 0)[channel_tile * TILE_CHANNELS + threadIdx.x];
    cp_async_wait<0>();
    __syncthreads();

    const u32 weights = smem_address(shared.weights) +
                        (warp_channel + (lane & 7) + ((lane >> 4) << 3)) * WEIGHT_PITCH * ELEMENT_BYTES +
                        ((lane >> 3) & 1) * 16;
    u32 held[Inner<TERMS>::HELD][BLOCKS / 2][4];
#pragma unroll
    for (int step = 0; step < HELD_STEPS; ++step)
#pragma unroll
        for (int n = 0; n < BLOCKS / 2; ++n)
            ldmatrix_x4(held[step][n], weights + n * 16 * WEIGHT_PITCH * ELEMENT_BYTES + step * K_STEP_BYTES);

    const int channel = channel_tile * TILE_CHANNELS + warp_channel;
    // Position of the lane in the first tile; each pass moves it on.
    int left = first_tile * TILE_COLS + lane / 4, top = y + first_pair * PAIR_ROWS;
    u32 patch =
        smem_address(shared.patch) + (first_pair * PAIR_ROWS * PITCH + lane / 4) * PIXEL_BYTES + t * 4 % PIXEL_BYTES;
    const int pixel_bytes = p.cout * ELEMENT_BYTES, row_bytes = p.width * pixel_bytes;
    u8* out = p.out + frame.out * p.out_slot_bytes + (static_cast<i64>(top) * p.width + left) * pixel_bytes +
              channel * ELEMENT_BYTES;
#pragma unroll 1
    for (int i = 0; i < tiles * PASSES; ++i) {
        // Keeps the compiler from holding shared memory in registers across passes.
        __syncwarp();
        float acc[PAIR_ROWS][BLOCKS][4];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const float2 v = *reinterpret_cast<const float2*>(shared.bias + warp_channel + channel_of(b, t));
#pragma unroll
            for (int m = 0; m < PAIR_ROWS; ++m) acc[m][b][0] = acc[m][b][2] = v.x, acc[m][b][1] = acc[m][b][3] = v.y;
        }
        multiply<TERMS>(acc, patch, t * 4 / PIXEL_BYTES, held, weights);

        Pair x[2 * PAIR_ROWS][BLOCKS];
        u32 valid = 0;
#pragma unroll
        for (int k = 0; k < 2 * PAIR_ROWS; ++k) {
            valid |= (top + k / 2 < p.height && left + k % 2 * 8 < p.width) << k;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) x[k][b] = pack2(acc[k / 2][b][k % 2 * 2], acc[k / 2][b][k % 2 * 2 + 1]);
        }
        if (OUTPUT == Output::PLAIN && p.records)
            reduce_moments(x, valid, lane, warp_channel / 4, shared.moments[i / PASSES][first_pair + i % PASSES]);
#pragma unroll
        for (int k = 0; k < 2 * PAIR_ROWS; ++k) {
            if (OUTPUT != Output::PLAIN)
                normalise_pairs<OUTPUT == Output::NORM_SILU>(x[k], shared.norm + warp_channel, t);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const int unit_channel = channel_of(unit * UNIT_BLOCKS, t);
                if (valid >> k & 1 && channel + unit_channel < p.cout) {
                    u8* to = out + k / 2 * row_bytes + k % 2 * 8 * pixel_bytes + unit_channel * ELEMENT_BYTES;
                    *reinterpret_cast<uint4*>(to) = unit_of(x[k], unit);
                }
            }
        }

        const bool below = i % PASSES + 1 < PASSES;
        left += below ? 0 : TILE_COLS;
        top += below ? PAIR_ROWS : -(PASSES - 1) * PAIR_ROWS;
        patch += (below ? PAIR_ROWS * PITCH : TILE_COLS - (PASSES - 1) * PAIR_ROWS * PITCH) * PIXEL_BYTES;
        out += below ? PAIR_ROWS * row_bytes : TILE_COLS * pixel_bytes - (PASSES - 1) * PAIR_ROWS * row_bytes;
    }

    if (OUTPUT == Output::PLAIN && p.records) {
        __syncthreads();
        for (int i = warp; i < tiles; i += WARPS)
            store_record<ROW_PAIRS, PAIR_ROWS>(p, tile, tile.frame, shared.moments[i], lane,
                                               (first_tile + i) * TILE_COLS, y, channel_tile * TILE_CHANNELS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) conv_in(const __grid_constant__ ConvParams p) {
    convolve<ALL_TERMS, Output::PLAIN>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv_in_norm(const __grid_constant__ ConvParams p) {
    convolve<ALL_TERMS, Output::NORM>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv_in_silu(const __grid_constant__ ConvParams p) {
    convolve<ALL_TERMS, Output::NORM_SILU>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT_BYTES == 2 ? ALONE_BLOCKS_PER_SM : BLOCKS_PER_SM)
    conv_in_alone(const __grid_constant__ ConvParams p) {
    convolve<1, Output::PLAIN>(p);
}
