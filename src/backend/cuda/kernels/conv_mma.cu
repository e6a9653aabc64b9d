// Convolution for compute capability 8.0 and later: cp.async, ldmatrix, mma.sync.
//
// A tile is 8 x 16 pixels by 128 output channels, one block each. A patch is loaded once for all its taps, one patch
// ahead; weight tiles are loaded `ahead` taps ahead. 92 KiB of shared memory allow one block on GeForce cards and two
// on data-centre cards.
#include "epilogue_mma.cuh"
#include "mainloop_mma.cuh"

constexpr int SHARED_BYTES = 95232;
static_assert(sizeof(Shared) == SHARED_BYTES, "dynamic shared memory of a launch");

/// `PARTIAL`: sums may start from partial sums of another launch, and may be stored as such.
template <bool PARTIAL>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    __shared__ WarpMoments<WARP_CHANNELS / 4> moments[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % STACKED_WARPS * WARP_ROWS, warp_channel = warp / STACKED_WARPS * WARP_CHANNELS;
    // What this lane passes to ldmatrix: pixel and half of a K step of A; byte offset in a weight tile of B.
    const int a_pixel = lane & 15, a_half = lane >> 4;
    const u32 b_offset =
        (warp_channel + (lane & 7) + ((lane >> 4) << 3)) * ROW_BYTES + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);

    const Tile tile(p, blockIdx.x, TILE_ROWS, TILE_COLS);
    const FrameParams& frame = p.frame[tile.frame];
    int taps = p.source[0].taps * p.source[0].k_blocks * frame.terms;
    if (frame.slot[SHORTCUT_TERM] >= 0) taps += p.source[1].k_blocks;

    TapLoader loader = {p, shared, tile, frame};
    for (int i = 0; i < p.ahead; ++i) {
        if (i < taps) loader.load_tap();
        cp_async_commit();
    }
    float acc[WARP_ROWS][WARP_CHANNELS / 8][4];
    const EpilogueMma<2 * WARP_ROWS, 2> epilogue = {p, tile, lane, tile.channel_tile * TILE_CHANNELS + warp_channel};
    const auto pixel_of = [&](int i) { return make_int2(tile.x + 8 * (i % 2) + lane / 4, tile.y + warp_row + i / 2); };
    const auto value = [&](int i, int block, int e) -> float& { return acc[i / 2][block][2 * (i % 2) + e]; };
    if (PARTIAL) epilogue.load_partial(pixel_of, value);
    else epilogue.load_bias(pixel_of, value);

    TapCursor current;
    int pitch = 0, cols = 0, col = 0;
    int pixel = 0;  // this lane's pixel of the patch, under the current tap
    for (int tap = 0; tap < taps; ++tap) {
        current.enter_patch(p, frame, tile.phase, [&](const Source& source, const Plane& plane, bool) {
            pitch = source.pitch;
            cols = plane.cols;
            col = 0;
            pixel = warp_row * pitch + a_pixel;
        });
        u32 a_address[WARP_ROWS];
        const u32 b_address = smem_address(shared.weights[current.weight_stage]) + b_offset;
#pragma unroll
        for (int m = 0; m < WARP_ROWS; ++m) {
            const int at = pixel + m * pitch;
            a_address[m] =
                smem_address(shared.patch[current.patch_stage]) + at * ROW_BYTES + ((a_half ^ (at & 7)) << 4);
        }
        ++pixel;
        if (++col == cols) {
            col = 0;
            pixel += pitch - cols;
        }

        if (p.ahead == 2) cp_async_wait<1>();
        else cp_async_wait<0>();
        __syncthreads();
        u32 a[FRAGMENT_STAGES][WARP_ROWS][4], b[FRAGMENT_STAGES][4][4];
        const auto load_fragments = [&](int k) {
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) ldmatrix_x4(a[k % FRAGMENT_STAGES][m], a_address[m] ^ (k << 5));
#pragma unroll
            for (int n = 0; n < 4; ++n)
                ldmatrix_x4(b[k % FRAGMENT_STAGES][n], (b_address ^ (k << 5)) + n * 16 * ROW_BYTES);
        };
        if (FRAGMENT_STAGES == 2) load_fragments(0);
        if (tap + p.ahead < taps) loader.load_tap();
        cp_async_commit();
#pragma unroll K_UNROLL
        for (int k = 0; k < K_STEPS; ++k) {
            if (FRAGMENT_STAGES == 1) load_fragments(k);
            else if (k + 1 < K_STEPS) load_fragments(k + 1);
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const u32(&channels)[4] = b[k % FRAGMENT_STAGES][n / 2];
                    mma_long_sum(acc[m][n], a[k % FRAGMENT_STAGES][m], channels[n % 2 * 2], channels[n % 2 * 2 + 1]);
                }
        }
        current.next_tap();
    }

    if (PARTIAL) {
        if (epilogue.store_partial(pixel_of, value)) return;
        epilogue.add_bias(value);
    }
    epilogue.store(pixel_of, value, p.records ? &moments[warp] : nullptr);
    if (p.records) {
        __syncthreads();
        if (threadIdx.x < 32) {
            const int half = lane / 16;
            store_record<STACKED_WARPS, WARP_ROWS>(p, tile, tile.frame, moments + STACKED_WARPS * half, lane % 16, tile.x,
                                                   tile.y, tile.channel_tile * TILE_CHANNELS + WARP_CHANNELS * half);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_mma(const __grid_constant__ ConvParams p) {
    convolve<false>(p);
}

// In f32 this needs one register more than two blocks per multiprocessor would leave.
extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT_BYTES == 4 ? 1 : 2)
    conv_mma_partial(const __grid_constant__ ConvParams p) {
    convolve<true>(p);
}
