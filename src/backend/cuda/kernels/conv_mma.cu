// Convolution for every card from compute capability 8.0 on: cp.async, ldmatrix, mma.sync.
//
// A tile is 8 x 16 pixels by 128 output channels, for four warps of 64 pixels (4 rows) by 64 channels. In f32, where a
// product takes more registers, it is eight warps of 2 rows. Patches are
// fetched once for all their taps, one ahead; weight tiles `ahead` taps ahead. 92 KiB of shared memory, so that one
// block fits a GeForce card and two fit a data-centre card.
#include "ampere.cuh"
#include "epilogue.cuh"

constexpr int ROWS = 8, COLS = 16;
constexpr int PATCH_STAGES = 2, WEIGHT_STAGES = 3;
constexpr int PATCH_BYTES = 180 * 128;  // 10 x 18 pixels
constexpr int WARP_ROWS = ELEMENT == 4 ? 2 : 4;
constexpr int BANDS = ROWS / WARP_ROWS;  // warps below each other
constexpr int THREADS = 2 * BANDS * 32;
constexpr int FETCHERS = 128;  // threads that fetch patches, the first ones, and weights, the last ones
constexpr int STEPS = ROW / STEP_BYTES;  // products of a tap
// Steps in registers: one is loaded while another is multiplied, but for f32, whose splitting takes the room.
constexpr int BUFFERS = ELEMENT == 4 ? 1 : 2, UNROLL = ELEMENT == 4 ? 1 : STEPS, FETCHES = BUFFERS;

struct Shared {
    u8 patch[PATCH_STAGES][PATCH_BYTES];
    u8 weights[WEIGHT_STAGES][WEIGHT_TILE];
};

/// A place in the sum over (term, chunk, plane, tap) of a tile.
struct Cursor {
    int term = 0, chunk = 0, plane = 0;
    int taps = 0;  // left of the patch under the cursor
    u32 patch = PATCH_STAGES - 1, weights = 0;  // stages

    /// Goes to the next patch when the taps of this one are used up; `enter(source, plane, shortcut)` then looks at it.
    template <class Enter>
    __device__ __forceinline__ void enter(const ConvParams& p, const Frame& frame, int phase, Enter enter) {
        if (taps > 0) return;
        const bool shortcut = term == frame.terms;
        const Source& source = p.source[shortcut];
        const Plane& at = source.plane[(shortcut ? 0 : phase * source.planes) + plane];
        patch ^= 1;
        taps = at.rows * at.cols;
        enter(source, at, shortcut);
        if (++plane < source.planes) return;
        plane = 0;
        if (++chunk < source.chunks) return;
        chunk = 0;
        ++term;
    }

    __device__ __forceinline__ void next() {
        --taps;
        weights = weights + 1 == WEIGHT_STAGES ? 0 : weights + 1;
    }
};

__device__ __forceinline__ void fetch_patch(const Source& source, const Plane& plane, const Tile& tile, const Place& from,
                                            int slot, int chunk, u32 to) {
    const int part = threadIdx.x % 8, first = threadIdx.x / 8;
    const int channel = chunk * CHUNK + part * UNIT;
    const int pitch = source.pitch, pixels = source.rows * pitch, stride = source.stride;
    const int width = from.width, height = source.height, pixel_bytes = source.channels * ELEMENT;
    const bool known = channel < source.channels;
    const u8* frame = from.frames + slot * from.slot_bytes + channel * ELEMENT;
    const u8* nothing = from.frames;
    u32 place = to + first * 128 + ((part ^ (first & 7)) << 4);  // steps of 16 pixels keep the swizzle
    const int left = plane.dx - from.first;
    int x = (tile.x + first) * stride + left, y = tile.y * stride + plane.dy;
    const int end = (tile.x + pitch) * stride + left;
#pragma unroll FETCHES
    for (int i = first; i < pixels; i += FETCHERS / 8) {
        const bool valid = known && static_cast<u32>(x) < width && static_cast<u32>(y) < height;
        const i64 offset = (static_cast<i64>(y) * width + x) * pixel_bytes;
        copy16(place, valid ? frame + offset : nothing, valid);
        place += FETCHERS / 8 * 128;
        x += FETCHERS / 8 * stride;
        if (x >= end) {
            x -= pitch * stride;
            y += stride;
        }
    }
}

/// `SUMS`: they may begin with those of another launch, and be left for one.
template <bool SUMS>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    __shared__ WarpSums<16> sums[2 * BANDS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % BANDS * WARP_ROWS, warp_column = warp / BANDS * 64;
    // What this lane hands to ldmatrix: pixel and half of a step's channels, column and half.
    const int a_pixel = lane & 15, a_half = lane >> 4;
    const u32 b_place = (warp_column + (lane & 7) + ((lane >> 4) << 3)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);

    const Tile tile(p, blockIdx.x, ROWS, COLS);
    const Frame& frame = p.frame[tile.frame];
    int steps = p.source[0].taps * p.source[0].chunks * frame.terms;
    if (frame.slot[3] >= 0) steps += p.source[1].chunks;

    Cursor ahead;
    const u8* weights = nullptr;
    const auto fetch = [&]() {
        ahead.enter(p, frame, tile.phase, [&](const Source& source, const Plane& plane, bool shortcut) {
            const int entry = shortcut ? 3 : ahead.term;
            if (ahead.chunk == 0 && ahead.plane == 0)
                weights = weight_run(p, source, shortcut, frame.slab[entry], tile) + threadIdx.x % FETCHERS * 16;
            if (threadIdx.x < FETCHERS) {
                const int place = place_of(p, frame, entry, tile);
                const int slot = place == FAR ? frame.far[entry] : frame.slot[entry];
                fetch_patch(source, plane, tile, p.place[place], slot, ahead.chunk, smem_address(shared.patch[ahead.patch]));
            }
        });
        if (threadIdx.x >= THREADS - FETCHERS) {
            const u32 to = smem_address(shared.weights[ahead.weights]) + threadIdx.x % FETCHERS * 16;
#pragma unroll
            for (int i = 0; i < WEIGHT_TILE; i += FETCHERS * 16) copy16(to + i, weights + i, true);
        }
        weights += WEIGHT_TILE;
        ahead.next();
    };

    for (int i = 0; i < p.ahead; ++i) {
        if (i < steps) fetch();
        copy_commit();
    }
    float acc[WARP_ROWS][8][4];
    const Ends<2 * WARP_ROWS, 2> ends = {p, tile, lane, tile.column * COLUMNS + warp_column};
    const auto place = [&](int i) { return make_int2(tile.x + 8 * (i % 2) + lane / 4, tile.y + warp_row + i / 2); };
    const auto value = [&](int i, int block, int e) -> float& { return acc[i / 2][block][2 * (i % 2) + e]; };
    if (SUMS) ends.load_sums(place, value);
    else ends.begin(place, value);
    Cursor here;
    int pitch = 0, cols = 0, col = 0;
    int pixel = 0;  // of this lane under the tap, in the patch
    for (int step = 0; step < steps; ++step) {
        here.enter(p, frame, tile.phase, [&](const Source& source, const Plane& plane, bool) {
            pitch = source.pitch;
            cols = plane.cols;
            col = 0;
            pixel = warp_row * pitch + a_pixel;
        });
        u32 a_place[WARP_ROWS];
        const u32 b_first = smem_address(shared.weights[here.weights]) + b_place;
#pragma unroll
        for (int m = 0; m < WARP_ROWS; ++m) {
            const int at = pixel + m * pitch;
            a_place[m] = smem_address(shared.patch[here.patch]) + at * 128 + ((a_half ^ (at & 7)) << 4);
        }
        ++pixel;
        if (++col == cols) {
            col = 0;
            pixel += pitch - cols;
        }

        if (p.ahead == 2) copy_wait<1>();
        else copy_wait<0>();
        __syncthreads();
        u32 a[BUFFERS][WARP_ROWS][4], b[BUFFERS][4][4];
        const auto load = [&](int k) {
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) load_matrices(a[k % BUFFERS][m], a_place[m] ^ (k << 5));
#pragma unroll
            for (int n = 0; n < 4; ++n) load_matrices(b[k % BUFFERS][n], (b_first ^ (k << 5)) + n * 16 * 128);
        };
        if (BUFFERS == 2) load(0);
        if (step + p.ahead < steps) fetch();
        copy_commit();
#pragma unroll UNROLL
        for (int k = 0; k < STEPS; ++k) {
            if (BUFFERS == 1) load(k);
            else if (k + 1 < STEPS) load(k + 1);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const u32(&columns)[4] = b[k % BUFFERS][n / 2];
                    mma_long(acc[m][n], a[k % BUFFERS][m], columns[n % 2 * 2], columns[n % 2 * 2 + 1]);
                }
        }
        here.next();
    }

    if (SUMS) {
        if (ends.leave_sums(place, value)) return;
        ends.add_bias(value);
    }
    ends.store(place, value, p.partials ? &sums[warp] : nullptr);
    if (p.partials) {
        __syncthreads();
        if (threadIdx.x < 32) {
            const int half = lane / 16;
            store_record<BANDS, WARP_ROWS>(p, tile, sums + BANDS * half, lane % 16, tile.x, tile.y, tile.column * COLUMNS + 64 * half);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_mma(const __grid_constant__ ConvParams p) { convolve<false>(p); }

// In f32 this takes a register more than two blocks on a multiprocessor would leave each other.
extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT == 4 ? 1 : 2) conv_mma_sums(const __grid_constant__ ConvParams p) { convolve<true>(p); }
