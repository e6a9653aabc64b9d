// 3x3 convolution of 4 input channels (pixels; the fourth is padding and holds zeros) to many: bound by writing the
// output.
//
// All taps of all terms together are one short inner dimension: 27 taps x 4 channels, padded to 112. The patch lies
// in shared memory with 4 channels a pixel, so that what a lane takes of the inner dimension is one 4-byte load. A
// block goes through a run of tiles side by side, to load its weights once.
//
// Where the output is normalised with statistics that are known, nobody needs it as it is: conv_in_norm and conv_in_silu do
// so before they store it, and make the bits of norm_apply and norm_silu.
#include "ampere.cuh"
#include "epilogue.cuh"

constexpr int ROWS = 8, COLS = 16, RUN = 8;  // tiles of a run
constexpr int THREADS = 256;  // eight warps of 2 rows of pixels by 64 columns
constexpr int PIXEL = 4 * ELEMENT;            // bytes of a pixel, and of the weights of a tap
constexpr int TERMS = 3, TAPS = 9;
constexpr int STEP_TAPS = STEP_BYTES / PIXEL, PADDED_TAPS = 28, STEPS = PADDED_TAPS / STEP_TAPS;
constexpr int PATCH = (ROWS + 2) * (COLS + 2);
// Elements; an odd number of 16-byte units keeps ldmatrix free of bank conflicts.
constexpr int WEIGHT_PITCH = PADDED_TAPS * 4 + UNIT;

struct Shared {
    Element weights[COLUMNS][WEIGHT_PITCH];
    u8 patch[2][TERMS * PATCH][PIXEL];
    int tap[PADDED_TAPS];  // where the taps lie in the patch, in bytes
    WarpSums<16> sums[8];
    alignas(16) float2 norm[COLUMNS];  // scale and shift
};

/// What becomes of the output.
enum class Output { AS_IT_IS, NORM, NORM_SILU };

/// 4 channels to shared memory; zeros when not `valid`.
__device__ __forceinline__ void copy_pixel(void* to, const void* from, bool valid) {
    if (PIXEL == 8) copy8(smem_address(to), from, valid);
    else copy16(smem_address(to), from, valid);
}

/// Columns of the weights of this frame's terms, one term after the other; zeros where there is no term. Packed slabs
/// are [column][tap][4 channels].
__device__ __forceinline__ void fetch_weights(const ConvParams& p, const Frame& frame, int column, Shared& shared) {
    const u8* weights = p.source[0].weights;
    for (int i = threadIdx.x; i < COLUMNS * PADDED_TAPS; i += THREADS) {
        const int n = i / PADDED_TAPS, tap = i % PADDED_TAPS, term = tap / TAPS;
        const bool valid = term < frame.terms;
        const i64 from = (static_cast<i64>(valid ? frame.slab[term] : 0) * p.column_tiles + column) * COLUMNS + n;
        copy_pixel(&shared.weights[n][tap * 4], weights + (from * TAPS + tap % TAPS) * PIXEL, valid);
    }
    copy_commit();
}

/// A patch of each term's frame; zeros outside the image and where there is no term.
__device__ __forceinline__ void fetch_patch(const ConvParams& p, const Frame& frame, int x0, int y0, u8 (*patch)[PIXEL]) {
    const Place& from = p.place[MAIN];
    const int height = p.source[0].height;
#pragma unroll 1
    for (int i = threadIdx.x; i < TERMS * PATCH; i += THREADS) {
        const int term = i / PATCH, at = i % PATCH;
        const int x = x0 - 1 + at % (COLS + 2), y = y0 - 1 + at / (COLS + 2);
        const bool valid = term < frame.terms && static_cast<u32>(x) < from.width && static_cast<u32>(y) < height;
        const u8* in = from.frames + (valid ? frame.slot[term] * from.slot_bytes : 0);
        copy_pixel(patch + i, in + (valid ? (static_cast<i64>(y) * from.width + x) * PIXEL : 0), valid);
    }
    copy_commit();
}

/// Normalises pairs of channels that were rounded, as reading them back would find them. `pairs` has scale and shift of the
/// lane's channels of each block.
template <bool SILU, int PIXELS, class Pairs>
__device__ __forceinline__ void normalise_pairs(Pair (&x)[PIXELS][4], Pairs pairs) {
    float scale[8], shift[8];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const float4 both = *reinterpret_cast<const float4*>(pairs(b));
        scale[2 * b] = both.x, shift[2 * b] = both.y, scale[2 * b + 1] = both.z, shift[2 * b + 1] = both.w;
    }
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
        float value[8];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const float2 pair = unpack2(x[i][b]);
            value[2 * b] = pair.x, value[2 * b + 1] = pair.y;
        }
        normalise<SILU>(value, scale, shift);
#pragma unroll
        for (int b = 0; b < 4; ++b) x[i][b] = pack2(value[2 * b], value[2 * b + 1]);
    }
}

template <Output OUTPUT>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % 4 * 2, warp_column = warp / 4 * 64;
    const int runs = (p.tiles_x + RUN - 1) / RUN;
    int index = blockIdx.x;
    const int column = index % p.column_tiles;
    index /= p.column_tiles;
    const int run = index % runs;
    index /= runs;
    const int row = index % p.tiles_y, frame_index = index / p.tiles_y;
    const Frame& frame = p.frame[frame_index];

    fetch_weights(p, frame, column, shared);
    const int end = min((run + 1) * RUN, p.tiles_x);
    const int y = p.first_row + row * ROWS;
    fetch_patch(p, frame, run * RUN * COLS, y, shared.patch[0]);
    if (threadIdx.x < PADDED_TAPS) {
        // The tap beyond the last has zero weights; it looks where the first tap looks, which is seen in any case.
        const int tap = threadIdx.x % (TERMS * TAPS);
        shared.tap[threadIdx.x] = (tap / TAPS * PATCH + tap % TAPS / 3 * (COLS + 2) + tap % 3) * PIXEL;
    }
    if (OUTPUT != Output::AS_IT_IS && threadIdx.x < COLUMNS)
        shared.norm[threadIdx.x] =
            scale_and_shift(p.norm, p.statistics[frame_index], column * COLUMNS + threadIdx.x, p.cout);
    const int t = lane & 3;
    const int corner = (warp_row * (COLS + 2) + lane / 4) * PIXEL + t * 4 % PIXEL;
    const u32 b_place = smem_address(shared.weights) +
                        (warp_column + (lane & 7) + ((lane >> 4) << 3)) * WEIGHT_PITCH * ELEMENT + ((lane >> 3) & 1) * 16;

    for (int i = run * RUN; i < end; ++i) {
        Tile tile;
        tile.column = column, tile.phase = 0, tile.frame = frame_index, tile.x = i * COLS, tile.y = y;
        const int stage = (i - run * RUN) % 2;
        copy_wait<0>();
        __syncthreads();  // everyone's copies have come, and nobody reads the patch of the tile before any more
        if (i + 1 < end) fetch_patch(p, frame, tile.x + COLS, tile.y, shared.patch[stage ^ 1]);

        const u8* patch = shared.patch[stage][0] + corner;
        float acc[2][8][4];
        const Ends<4, 2, false, false> ends = {p, tile, lane, column * COLUMNS + warp_column};
        const auto place = [&](int i) { return make_int2(tile.x + 8 * (i % 2) + lane / 4, tile.y + warp_row + i / 2); };
        const auto value = [&](int i, int block, int e) -> float& { return acc[i / 2][block][2 * (i % 2) + e]; };
        ends.begin(place, value);
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            const int* taps = shared.tap + STEP_TAPS * step + t * 4 / PIXEL;
            const int tap[2] = {taps[0], taps[STEP_TAPS / 2]};
            u32 b[4][4];
#pragma unroll
            for (int n = 0; n < 4; ++n) load_matrices(b[n], b_place + n * 16 * WEIGHT_PITCH * ELEMENT + step * STEP_BYTES);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                // This lane's 4 bytes of the lower and of the upper 16 of the step.
                u32 a[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    a[k] = *reinterpret_cast<const u32*>(patch + tap[k / 2] + (m * (COLS + 2) + k % 2 * 8) * PIXEL);
#pragma unroll
                for (int n = 0; n < 8; ++n) mma(acc[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }

        if (OUTPUT != Output::AS_IT_IS) {
            ends.store(place, value, nullptr, [&](int g, Pair(&x)[4][4]) {
                const float2* pairs = shared.norm + warp_column + 32 * g + 2 * t;
                normalise_pairs<OUTPUT == Output::NORM_SILU>(x, [&](int b) { return pairs + 8 * b; });
            });
            continue;
        }
        ends.store(place, value, p.partials ? &shared.sums[warp] : nullptr);
        if (p.partials) {
            __syncthreads();
            if (threadIdx.x < 32) {
                const int half = lane / 16;
                store_record<4, 2>(p, tile, shared.sums + 4 * half, lane % 16, tile.x, tile.y, column * COLUMNS + 64 * half);
            }
        }
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
