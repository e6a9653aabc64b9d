// 3x3 convolution of 4 input channels (pixels; the fourth is padding and holds zeros) to many: bound by writing the
// output.
//
// All taps of all terms together are one short inner dimension: 27 taps x 4 channels, padded to 112. The patch lies
// in shared memory with 4 channels a pixel, so that what a lane takes of the inner dimension is one 4-byte load. A
// block loads its weights and the patch of a whole run of tiles side by side; from then on its warps wait for nothing, so
// that the stores of one and the products of another overlap.
//
// Which output channel is which column of a product is free. A lane's columns of a pixel are made neighbouring channels, so
// that it stores whole units as they come out of the products.
//
// Where the output is normalised with statistics that are known, nobody needs it as it is: conv_in_norm and conv_in_silu do
// so before they store it, and make the bits of norm_apply and norm_silu.
#include "ampere.cuh"
#include "statistics.cuh"

constexpr int ROWS = 8, COLS = 16;  // of a tile
constexpr int MAX_RUN = 16 / ELEMENT;
constexpr int THREADS = 256, WARPS = 8;  // of 4 rows of pixels, two at a time, by 32 columns
constexpr int WARP_COLUMNS = 32, BLOCKS = WARP_COLUMNS / 8;
constexpr int PAIR_ROWS = 2, ROW_PAIRS = ROWS / PAIR_ROWS;
constexpr int PASSES = ROW_PAIRS * (COLUMNS / WARP_COLUMNS) / WARPS;  // of a warp through a tile, one below the other
constexpr int UNIT_BLOCKS = UNIT / 2, UNITS = BLOCKS / UNIT_BLOCKS;   // of a lane and pixel: blocks that make a unit, and units
constexpr int PIXEL = 4 * ELEMENT;                                    // bytes of a pixel, and of the weights of a tap
constexpr int TERMS = 3, TAPS = 9;
constexpr int STEP_TAPS = STEP_BYTES / PIXEL, PADDED_TAPS = 28, STEPS = PADDED_TAPS / STEP_TAPS;
// Pixels of a row of the patch. Two taps that lanes read at once are the last of a row and the first of the next at times:
// with 2 bytes an element these are 64 bytes apart, modulo all banks. With 4 they read one tap.
constexpr int PITCH = MAX_RUN * COLS + (ELEMENT == 2 ? 10 : 2);
constexpr int PATCH = (ROWS + 2) * PITCH;
// Elements; an odd number of 16-byte units keeps ldmatrix free of bank conflicts.
constexpr int WEIGHT_PITCH = PADDED_TAPS * 4 + UNIT;
// Steps whose weights a warp keeps in registers: with 4 bytes an element there are too few.
constexpr int HELD = ELEMENT == 2 ? STEPS : 0;

struct Shared {
    Element weights[COLUMNS][WEIGHT_PITCH];
    u8 patch[TERMS][PATCH][PIXEL];
    alignas(16) float2 norm[COLUMNS];  // scale and shift
    float bias[COLUMNS];
    WarpSums<COLUMNS / 4> sums[MAX_RUN][ROW_PAIRS];
};

/// What becomes of the output.
enum class Output { AS_IT_IS, NORM, NORM_SILU };

/// 4 channels to shared memory; zeros when not `valid`.
__device__ __forceinline__ void copy_pixel(void* to, const void* from, bool valid) {
    if (PIXEL == 8) copy8(smem_address(to), from, valid);
    else copy16(smem_address(to), from, valid);
}

/// The first channel of a lane's pair of columns of a block, of those of a warp. Bits from the highest: unit, lane of the four
/// of a pixel, block of the unit.
__device__ __forceinline__ int channel_of(int block, int t) {
    return (block / UNIT_BLOCKS * 4 + t) * UNIT + block % UNIT_BLOCKS * 2;
}

/// The column of a product that a channel is, of those of a column tile.
__device__ __forceinline__ u32 column_of(u32 channel) {
    const u32 block = channel % WARP_COLUMNS / (4 * UNIT) * UNIT_BLOCKS + channel % UNIT / 2;
    return channel / WARP_COLUMNS * WARP_COLUMNS + block * 8 + channel / UNIT % 4 * 2 + channel % 2;
}

/// Columns of the weights of this frame's terms, one term after the other; zeros where there is no term. Packed slabs
/// are [channel][tap][4 input channels].
__device__ __forceinline__ void fetch_weights(const ConvParams& p, const Frame& frame, int column, Shared& shared) {
    const u8* slab[TERMS];
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        const i64 tile = static_cast<i64>(term < frame.terms ? frame.slab[term] : 0) * p.column_tiles + column;
        slab[term] = p.source[0].weights + tile * COLUMNS * TAPS * PIXEL;
    }
    for (u32 i = threadIdx.x; i < COLUMNS * TAPS; i += THREADS) {
        Element* to = shared.weights[column_of(i / TAPS)] + i % TAPS * 4;
#pragma unroll
        for (int term = 0; term < TERMS; ++term) copy_pixel(to + term * TAPS * 4, slab[term] + i * PIXEL, term < frame.terms);
    }
    if (threadIdx.x < COLUMNS) copy_pixel(&shared.weights[threadIdx.x][TERMS * TAPS * 4], p.source[0].weights, false);
}

/// A patch of each term's frame for `tiles` tiles; zeros outside the image and where there is no term.
__device__ __forceinline__ void fetch_patch(const ConvParams& p, const Frame& frame, int x0, int y0, int tiles, Shared& shared) {
    const Place& place = p.place[MAIN];
    const int height = p.source[0].height;
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < TERMS * (ROWS + 2); i += WARPS) {
        const int term = i / (ROWS + 2), row = i % (ROWS + 2), y = y0 - 1 + row;
        const bool there = term < frame.terms && static_cast<u32>(y) < height;
        const i64 first = there ? frame.slot[term] * place.slot_bytes + static_cast<i64>(y) * place.width * PIXEL : 0;
        const u8* from = place.frames + first;
        for (int col = lane; col < tiles * COLS + 2; col += 32) {
            const int x = x0 - 1 + col;
            const bool valid = there && static_cast<u32>(x) < place.width;
            copy_pixel(shared.patch[term][row * PITCH + col], from + (valid ? x : 0) * PIXEL, valid);
        }
    }
}

/// Where a tap lies in the patch, in bytes. The tap beyond the last has zero weights; it looks where the first tap looks, which
/// is seen in any case.
constexpr __host__ __device__ int tap_place(int tap) {
    return (tap % (TERMS * TAPS) / TAPS * PATCH + tap % TAPS / 3 * PITCH + tap % 3) * PIXEL;
}

/// Adds up the products of 2 x 16 pixels and a warp's columns. `patch`: what the lane takes of the first tap.
__device__ __forceinline__ void multiply(float (&acc)[PAIR_ROWS][BLOCKS][4], u32 patch, int lane_tap,
                                         const u32 (&held)[HELD ? HELD : 1][BLOCKS / 2][4], u32 weights) {
#pragma unroll(HELD ? STEPS : 1)
    for (int step = 0; step < STEPS; ++step) {
        u32 b[BLOCKS / 2][4];
#pragma unroll
        for (int n = 0; n < BLOCKS / 2; ++n) {
            if (step < HELD) {
#pragma unroll
                for (int k = 0; k < 4; ++k) b[n][k] = held[step][n][k];
            } else {
                load_matrices(b[n], weights + n * 16 * WEIGHT_PITCH * ELEMENT + step * STEP_BYTES);
            }
        }
        // This lane's 4 bytes of the lower and of the upper 16 of the step. Lanes side by side may look at two taps; these are
        // a few distances apart, each of which takes a register for all of the products.
        u32 taps[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int first = STEP_TAPS * step + STEP_TAPS / 2 * half, last = first + STEP_TAPS / 2 - 1;
            taps[half] = patch + lane_tap * (tap_place(last) - tap_place(first)) + tap_place(first);
        }
#pragma unroll
        for (int m = 0; m < PAIR_ROWS; ++m) {
            u32 a[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                a[k] = load_word(taps[k / 2] + (m * PITCH + k % 2 * 8) * PIXEL);
#pragma unroll
            for (int n = 0; n < BLOCKS; ++n) mma(acc[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
}

/// Normalises pairs of channels that were rounded, as reading them back would find them. `norm` has scale and shift of the
/// warp's channels.
template <bool SILU>
__device__ __forceinline__ void normalise_pairs(Pair (&x)[BLOCKS], const float2* norm, int t) {
    float value[2 * BLOCKS], scale[2 * BLOCKS], shift[2 * BLOCKS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        const float4 both = load_floats(smem_address(norm + channel_of(b, t)));
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

template <Output OUTPUT>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int warp_column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS, first_pair = warp / (COLUMNS / WARP_COLUMNS) * PASSES;
    const int runs = (p.tiles_x + p.run - 1) / p.run;
    int index = blockIdx.x;
    const int column = index % p.column_tiles;
    index /= p.column_tiles;
    const int first_tile = index % runs * p.run, tiles = min(p.run, p.tiles_x - first_tile);
    index /= runs;
    const int y = p.first_row + index % p.tiles_y * ROWS, frame_index = index / p.tiles_y;
    const Frame& frame = p.frame[frame_index];

    fetch_weights(p, frame, column, shared);
    fetch_patch(p, frame, first_tile * COLS, y, tiles, shared);
    copy_commit();
    if (OUTPUT != Output::AS_IT_IS && threadIdx.x < COLUMNS)
        shared.norm[threadIdx.x] =
            scale_and_shift(p.norm, p.statistics[frame_index], column * COLUMNS + threadIdx.x, p.cout);
    Tile tile;
    tile.column = column, tile.phase = 0, tile.frame = frame_index, tile.y = y;
    if (threadIdx.x < COLUMNS) shared.bias[threadIdx.x] = bias_of(p, tile, 0)[column * COLUMNS + threadIdx.x];
    copy_wait<0>();
    __syncthreads();

    const u32 weights = smem_address(shared.weights) +
                        (warp_column + (lane & 7) + ((lane >> 4) << 3)) * WEIGHT_PITCH * ELEMENT + ((lane >> 3) & 1) * 16;
    u32 held[HELD ? HELD : 1][BLOCKS / 2][4];
#pragma unroll
    for (int step = 0; step < HELD; ++step)
#pragma unroll
        for (int n = 0; n < BLOCKS / 2; ++n)
            load_matrices(held[step][n], weights + n * 16 * WEIGHT_PITCH * ELEMENT + step * STEP_BYTES);

    const int channel = column * COLUMNS + warp_column;
    // Of the first tile; from one to the next they go on.
    int left = first_tile * COLS + lane / 4, top = y + first_pair * PAIR_ROWS;
    u32 patch = smem_address(shared.patch) + (first_pair * PAIR_ROWS * PITCH + lane / 4) * PIXEL + t * 4 % PIXEL;
    const int pixel = p.cout * ELEMENT, row = p.width * pixel;
    u8* out = p.out + frame.out * p.out_slot_bytes + (static_cast<i64>(top) * p.width + left) * pixel + channel * ELEMENT;
#pragma unroll 1
    for (int i = 0; i < tiles * PASSES; ++i) {
        // Nothing that the loop reads of shared memory is to be kept in registers throughout.
        __syncwarp();
        float acc[PAIR_ROWS][BLOCKS][4];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const float2 v = *reinterpret_cast<const float2*>(shared.bias + warp_column + channel_of(b, t));
#pragma unroll
            for (int m = 0; m < PAIR_ROWS; ++m) acc[m][b][0] = acc[m][b][2] = v.x, acc[m][b][1] = acc[m][b][3] = v.y;
        }
        multiply(acc, patch, t * 4 / PIXEL, held, weights);

        Pair x[2 * PAIR_ROWS][BLOCKS];
        u32 valid = 0;
#pragma unroll
        for (int k = 0; k < 2 * PAIR_ROWS; ++k) {
            valid |= (top + k / 2 < p.height && left + k % 2 * 8 < p.width) << k;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) x[k][b] = pack2(acc[k / 2][b][k % 2 * 2], acc[k / 2][b][k % 2 * 2 + 1]);
        }
        if (OUTPUT == Output::AS_IT_IS && p.partials)
            gather_units(x, valid, lane, warp_column / 4, shared.sums[i / PASSES][first_pair + i % PASSES]);
#pragma unroll
        for (int k = 0; k < 2 * PAIR_ROWS; ++k) {
            if (OUTPUT != Output::AS_IT_IS)
                normalise_pairs<OUTPUT == Output::NORM_SILU>(x[k], shared.norm + warp_column, t);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const int mine = channel_of(unit * UNIT_BLOCKS, t);
                if (valid >> k & 1 && channel + mine < p.cout)
                    *reinterpret_cast<uint4*>(out + k / 2 * row + k % 2 * 8 * pixel + mine * ELEMENT) = unit_of(x[k], unit);
            }
        }

        const bool below = i % PASSES + 1 < PASSES;
        left += below ? 0 : COLS;
        top += below ? PAIR_ROWS : -(PASSES - 1) * PAIR_ROWS;
        patch += (below ? PAIR_ROWS * PITCH : COLS - (PASSES - 1) * PAIR_ROWS * PITCH) * PIXEL;
        out += below ? PAIR_ROWS * row : COLS * pixel - (PASSES - 1) * PAIR_ROWS * row;
    }

    if (OUTPUT == Output::AS_IT_IS && p.partials) {
        __syncthreads();
        for (int i = warp; i < tiles; i += WARPS)
            store_record<ROW_PAIRS, PAIR_ROWS>(p, tile, shared.sums[i], lane, (first_tile + i) * COLS, y, column * COLUMNS);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_in(const __grid_constant__ ConvParams p) {
    convolve<Output::AS_IT_IS>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_in_norm(const __grid_constant__ ConvParams p) {
    convolve<Output::NORM>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_in_silu(const __grid_constant__ ConvParams p) {
    convolve<Output::NORM_SILU>(p);
}
