// Convolution for compute capability 8.0 and later: cp.async, ldmatrix, mma.sync. See mainloop_mma.cuh.
//
// A tile is 8 x 16 pixels by 128 or 96 output channels, one block each. A patch has a K block of channels and serves all
// its taps; the next one is loaded meanwhile. 45 KiB of shared memory allow two blocks on every card.
#include "epilogue_mma.cuh"
#include "mainloop_mma.cuh"

// f32 products take more registers, so its warps compute half of the rows, and there is one block.
constexpr int THREADS_2B = 128;  // 2-byte elements
constexpr int THREADS_4B = 256;  // 4-byte elements
constexpr int THREADS = ELEMENT_BYTES == 4 ? THREADS_4B : THREADS_2B;
// Three warps beside each other would leave a quarter of the tensor cores idle, so six compute half of the rows.
constexpr int NARROW_THREADS = 192;
constexpr int LOADERS = 128;  // threads that load patches
constexpr int BLOCKS_PER_SM = ELEMENT_BYTES == 4 ? 1 : 2;

constexpr int PATCH_STAGES = 2;
constexpr int SHARED_BYTES = 46080;
constexpr int NARROW_SHARED_BYTES = 23040;
static_assert(PATCH_STAGES * PATCH_PIXELS * Wide::ROW == SHARED_BYTES &&
                  PATCH_STAGES * PATCH_PIXELS * Narrow::ROW == NARROW_SHARED_BYTES,
              "dynamic shared memory of a launch");

/// How the warps of a block share a tile.
template <class Widths_>
struct BlockOf {
    using Widths = Widths_;
    static constexpr bool WIDE = Widths::ROW == Wide::ROW;
    static constexpr int BLOCK_THREADS = WIDE ? THREADS : NARROW_THREADS;
    static constexpr int STACKED_WARPS = BLOCK_THREADS / 32 / Steps<Widths>::CHANNEL_WARPS;  // of one channel range
    static constexpr int WARP_ROWS = TILE_ROWS / STACKED_WARPS;
    static constexpr int STEP_UNROLL = ELEMENT_BYTES == 4 ? 1 : Steps<Widths>::COUNT;
    static constexpr int PATCH_BYTES = PATCH_PIXELS * Widths::ROW;
    typedef float Accumulators[WARP_ROWS][CHANNEL_BLOCKS][4];
};

/// Goes through the patches of a tile, in the order of its sum.
template <class Block>
struct PatchCursor {
    using Widths = typename Block::Widths;
    const ConvParams& p;
    const Tile& tile;
    const FrameParams& frame;
    int terms;  // with the shortcut
    int term = 0, k_block = 0, plane = 0;
    const u8* weights = nullptr;  // of the patch's first tap

    __device__ __forceinline__ PatchCursor(const ConvParams& p, const Tile& tile, const FrameParams& frame)
        : p(p), tile(tile), frame(frame), terms(frame.terms + (frame.slot[SHORTCUT_TERM] >= 0)) {
        enter_term();
    }

    __device__ __forceinline__ bool done() const { return term == terms; }
    __device__ __forceinline__ bool is_shortcut() const { return term == frame.terms; }
    __device__ __forceinline__ int slot() const { return is_shortcut() ? SHORTCUT_TERM : term; }
    __device__ __forceinline__ const Source& source() const { return p.source[is_shortcut()]; }
    __device__ __forceinline__ const Plane& patch() const {
        return source().plane[(is_shortcut() ? 0 : tile.phase * source().planes) + plane];
    }

    __device__ __forceinline__ void enter_term() {
        if (!done()) weights = weight_tiles<Widths>(p, source(), is_shortcut(), frame.slab[slot()], tile);
    }

    /// After the last patch, `weights` stay where they are: there is one load too many.
    __device__ __forceinline__ void advance() {
        const u8* const first = weights;
        weights += patch().rows * patch().cols * Widths::BYTES;
        if (++plane < source().planes) return;
        plane = 0;
        if (++k_block < source().k_blocks) return;
        k_block = 0;
        ++term;
        weights = first;
        enter_term();
    }

    __device__ __forceinline__ void load(u32 to) const {
        if (done() || (Block::BLOCK_THREADS > LOADERS && threadIdx.x >= LOADERS)) return;
        const InputFrame input = input_frame(p, frame, slot(), tile);
        const UnitWalk<LOADERS, Widths::ROW / UNIT_BYTES> units(thread_now());
        const UnitSource from = units.locate(source(), patch(), p.part[input.part], input.slot, tile);
        units.load(source(), from, k_block * Widths::CHANNELS, to);
    }
};

/// What a lane passes to ldmatrix: a column of the warp's first row, and a unit of a product.
template <class Widths>
struct LanePixel {
    u32 address;  // of the pixel in the patch
    int col, unit;

    /// The unit that it has `taps` columns further right.
    __device__ __forceinline__ u32 at(int taps) const {
        return address + ((unit ^ (Widths::ROW == 128 ? (col + taps) & 7 : (col + taps) >> 1 & 3)) << 4);
    }
};

/// Products of a patch, tap by tap. Weights are loaded a step ahead.
template <class Block>
struct TapProducts {
    using Widths = typename Block::Widths;
    static constexpr int STEPS = Steps<Widths>::COUNT, STEP_UNROLL = Block::STEP_UNROLL;
    StepWeights<Widths> weights;

    __device__ __forceinline__ void load(const u8* from) { weights.load(from); }

    /// `from`: the patch's weights; `next`: those of the patch that follows.
    __device__ __forceinline__ void add(int rows, int cols, LanePixel<Widths> pixel, const u8* from, const u8* next,
                                        typename Block::Accumulators& acc) {
        const int taps = rows * cols;
#pragma unroll 1
        for (int tap = 0, col = 0; tap < taps; ++tap) {
            const u32 a = pixel.at(col);
#pragma unroll STEP_UNROLL
            for (int step = 0; step < STEPS; ++step) {
                const bool last = step + 1 == STEPS && tap + 1 == taps;
                from = last ? next : from + Steps<Widths>::TILE_BYTES;
                StepWeights<Widths> following;
                following.load(from);
                add_column<Widths::ROW>(a ^ (step << 6), weights.product[0], acc);
                add_column<Widths::ROW>(a ^ (step << 6) ^ 32, weights.product[1], acc);
                weights = following;
            }
            pixel.address += Widths::ROW;
            if (++col == cols) {
                col = 0;
                pixel.address += (PATCH_PITCH - cols) * Widths::ROW;
            }
        }
    }
};

/// Products of a patch with 2 x 2 taps, column by column: both taps of a column share the reads of the patch. Weights
/// are loaded a product ahead.
template <class Block>
struct ColumnProducts {
    using Widths = typename Block::Widths;
    static constexpr int SIDE = 2, TAP_ROW_BYTES = SIDE * Widths::BYTES, STEPS = Steps<Widths>::COUNT;
    ColumnWeights<SIDE> first;

    __device__ __forceinline__ void load(const u8* from) { first.load(from, TAP_ROW_BYTES); }

    __device__ __forceinline__ void add(int, int, LanePixel<Widths> pixel, const u8* from, const u8* next,
                                        typename Block::Accumulators& acc) {
#pragma unroll 1
        for (int col = 0; col < SIDE; ++col) {
            const u32 a = pixel.at(col) + col * Widths::ROW;
            // Unrolled, it spills.
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) {
                ColumnWeights<SIDE> second;
                second.load(from + Steps<Widths>::PRODUCT_BYTES, TAP_ROW_BYTES);
                add_column<Widths::ROW>(a ^ (step << 6), first, acc);
                const bool last = step + 1 == STEPS && col + 1 == SIDE;
                from = last ? next : from + Steps<Widths>::TILE_BYTES;
                first.load(from, TAP_ROW_BYTES);
                add_column<Widths::ROW>(a ^ (step << 6) ^ 32, second, acc);
            }
        }
    }
};

/// `PARTIAL`: sums may start from partial sums of another launch, and may be stored as such.
template <class Block, bool PARTIAL, class Products>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    using Widths = typename Block::Widths;
    constexpr int STACKED_WARPS = Block::STACKED_WARPS, WARP_ROWS = Block::WARP_ROWS;
    extern __shared__ __align__(128) u8 memory[];
    __shared__ WarpMoments<WARP_CHANNELS / 4> moments[Block::WIDE ? Block::BLOCK_THREADS / 32 : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp % STACKED_WARPS * WARP_ROWS, warp_channel = warp / STACKED_WARPS * WARP_CHANNELS;
    const Tile tile(p, blockIdx.x, TILE_ROWS, TILE_COLS);
    const FrameParams& frame = p.frame[tile.frame];
    u32 stage = smem_address(memory), other = stage + Block::PATCH_BYTES;

    PatchCursor<Block> next(p, tile, frame);
    next.load(stage);
    cp_async_commit();
    typename Block::Accumulators acc;
    const int2 first_pixel = make_int2(tile.x + lane / 4, tile.y + warp_row);
    const EpilogueMma<2 * WARP_ROWS, Widths> epilogue = {
        p, tile, frame, lane, first_pixel, tile.channel_tile * Widths::COLUMNS + warp_channel};
    const auto value = [&](int i, int block, int e) -> float& { return acc[i / 2][block][2 * (i % 2) + e]; };
    if (PARTIAL) epilogue.load_partial(value);
    else epilogue.load_bias(value);

    const int a_col = lane & 15, a_unit = lane >> 4;
    const u32 a_lane = (warp_row * PATCH_PITCH + a_col) * Widths::ROW;
    const int b_lane = lane_weights(warp_channel, lane);
    Products products;
    products.load(next.weights + b_lane);
    while (!next.done()) {
        const int rows = next.patch().rows, cols = next.patch().cols;
        const u8* const weights = next.weights + b_lane;
        next.advance();
        cp_async_wait<0>();
        __syncthreads();
        next.load(other);
        cp_async_commit();
        products.add(rows, cols, LanePixel<Widths>{stage + a_lane, a_col, a_unit}, weights, next.weights + b_lane, acc);
        const u32 used = stage;
        stage = other, other = used;
    }

    if (PARTIAL) {
        if (epilogue.store_partial(value)) return;
        epilogue.add_bias(value);
    }
    if constexpr (!Block::WIDE) {
        epilogue.store(value, nullptr);
        return;
    }
    epilogue.store(value, p.records ? &moments[warp] : nullptr);
    if (p.records) {
        __syncthreads();
        if (threadIdx.x < 32) {
            constexpr int QUADS = WARP_CHANNELS / 4;
            store_record<STACKED_WARPS, WARP_ROWS>(p, tile, tile.frame, moments + lane / QUADS * STACKED_WARPS,
                                                   lane % QUADS, tile.x, tile.y,
                                                   tile.channel_tile * TILE_CHANNELS + lane / QUADS * WARP_CHANNELS);
        }
    }
}

typedef BlockOf<Wide> WideBlock;
typedef BlockOf<Narrow> NarrowBlock;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) conv_mma(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve<WideBlock, false, TapProducts<WideBlock>>(p);
}

#ifndef VVAE_FP32
/// For the window Up.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) conv_mma_up(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve<WideBlock, false, ColumnProducts<WideBlock>>(p);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv_mma_partial(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve<WideBlock, true, TapProducts<WideBlock>>(p);
}

extern "C" __global__ void __launch_bounds__(NARROW_THREADS, BLOCKS_PER_SM)
    conv_mma_96(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve<NarrowBlock, false, TapProducts<NarrowBlock>>(p);
}
