// Pairs of output frames by Winograd F(2,3) in time, for compute capability 8.0 and later. See mainloop_mma.cuh.
//
//     m0 = U0 (d0 - d2)    m1 = U1 (d1 + d2)    m2 = U2 (d2 - d1)    m3 = U3 (d1 - d3)
//     first frame = m0 + m1 + m2        second frame = m1 - m2 - m3
//
// d0 to d3 are the input frames of both, U0 to U3 sums of the weights' slabs. A tile is 8 x 16 pixels of both frames by
// 128 or 96 output channels. Half of the warps sum m1, half m2. Then they exchange their sums, and each group has the sum
// of one frame, to which it adds m0 or -m3. So each frame's sum has the same products in the same order if the other
// frame is missing.
//
// A group loads a step of channels of two patches. Each thread adds or subtracts the units that it has loaded. Groups
// wait for each other in the exchange only, so one multiplies while the other loads. Blocks are persistent: the next
// tile's first patches arrive before the epilogue. `p.frames` counts pairs.
//
// With the window Up the input is not normalised. Sums of two frames might leave the range of f16, so they are halved;
// the weights are packed twice as large.
#include "epilogue_mma.cuh"
#include "mainloop_mma.cuh"

constexpr int THREADS = 256;
// Three warps of a group would leave a quarter of the tensor cores idle, so six compute half of the rows.
constexpr int NARROW_THREADS = 384;
constexpr int LOADERS = 128;  // threads of a group that load patches
constexpr int PATCH_BYTES = PATCH_PIXELS * STEP_BYTES;
constexpr int STEP_UNITS = STEP_BYTES / UNIT_BYTES;
constexpr int SHARED_BYTES = 94624;
constexpr int NARROW_SHARED_BYTES = 90992;

/// What depends on the window: Same has 3 x 3 taps, Up 2 x 2 for each phase. And how warps share a tile.
template <class Widths_, int SIDE_>
struct PairWindow {
    using Widths = Widths_;
    static constexpr bool WIDE = Widths::ROW == Wide::ROW;
    static constexpr int BLOCK_THREADS = WIDE ? THREADS : NARROW_THREADS, GROUP_THREADS = BLOCK_THREADS / 2;
    static constexpr int GROUP_WARPS = GROUP_THREADS / 32;
    static constexpr int STACKED_WARPS = GROUP_WARPS / Steps<Widths>::CHANNEL_WARPS;  // of one channel range
    static constexpr int WARP_ROWS = TILE_ROWS / STACKED_WARPS;
    static constexpr int EXCHANGED = WIDE ? 8 : 4;  // sums that a thread exchanges at once
    // Of a tap in both slabs, and of a step of one.
    static constexpr int TAP_BYTES = 2 * Steps<Widths>::TILE_BYTES, STEP_TILE_BYTES = Steps<Widths>::TILE_BYTES;
    static constexpr int SIDE = SIDE_;
    static constexpr bool UP = SIDE == 2;
    static constexpr int TAPS = SIDE * SIDE, TAP_ROW_BYTES = SIDE * TAP_BYTES;
    // Columns of taps before which a group loads and transforms its next patches.
    static constexpr int LOAD_COL = 0, TRANSFORM_COL = SIDE - 1;

    static __device__ __forceinline__ int phase(const Tile& tile) { return UP ? tile.phase : 0; }
};

/// What the products of a step add: to m1 or m2, to one frame, or the shortcut to one frame.
enum Sum { SHARED, OWN, SHORTCUT_SUM };

typedef UnitWalk<LOADERS, STEP_UNITS> PairUnits;

struct GroupShared {
    u8 patch[2][PATCH_BYTES];             // [stage]
    u8 other[PATCH_BYTES];                // what is added or subtracted
    UnitSource source[2][LOADERS];        // of both, for the sum that is loaded. Each thread has its own
};

template <class Window>
struct PairShared {
    GroupShared group[2];
    float4 exchange[2][Window::EXCHANGED / 4][Window::BLOCK_THREADS];
    WarpMoments<WARP_CHANNELS / 4> moments[Window::BLOCK_THREADS / 32];
    Tile tile[Window::BLOCK_THREADS / 32];
};

/// Goes through the steps of a group's tiles.
template <class Window>
struct StepCursor {
    const ConvParams& p;
    Tile& tile;  // of the warp, in shared memory
    int group;
    int index;
    int sum;
    int step;
    const u8* weights;  // of the step's first tap

    __device__ __forceinline__ StepCursor(const ConvParams& p, Tile& tile, int group)
        : p(p), tile(tile), group(group), index(blockIdx.x) {
        enter_tile();
    }

    __device__ __forceinline__ bool done() const { return index >= Tile::count(p); }
    __device__ __forceinline__ FramePair pair() const { return FramePair(p, tile); }
    __device__ __forceinline__ const Source& source() const { return p.source[sum == SHORTCUT_SUM]; }

    __device__ __forceinline__ void enter_tile() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) tile = Tile(p, index, TILE_ROWS, TILE_COLS);
        __syncwarp();
        enter_sum(SHARED);
    }

    __device__ __forceinline__ void enter_sum(int next) {
        sum = next, step = 0;
        if (sum == SHORTCUT_SUM) {
            weights = weight_tiles<typename Window::Widths>(p, p.source[1], true, 0, tile);
            return;
        }
        // Two slabs lie side by side, a step's tile of each in turn.
        const int phase = (sum == OWN ? p.phases : 0) + Window::phase(tile);
        const i64 first = phase * p.channel_tiles + tile.channel_tile;
        weights = p.source[0].weights + first * p.source[0].k_blocks * Window::TAPS * (2 * Window::Widths::BYTES) +
                  group * Window::STEP_TILE_BYTES;
    }

    /// True if a tile ends.
    __device__ __forceinline__ bool advance() {
        weights += sum == SHORTCUT_SUM ? Window::STEP_TILE_BYTES : Window::TAPS * Window::TAP_BYTES;
        if (++step < source().k_blocks * Steps<typename Window::Widths>::COUNT) return false;
        const FrameParams& own = pair().frame[group];
        if (own.terms > 0 && (sum == SHARED || (sum == OWN && own.slot[SHORTCUT_TERM] >= 0))) {
            enter_sum(sum + 1);
            return false;
        }
        index += gridDim.x;
        if (!done()) enter_tile();
        else weights = p.source[0].weights;  // there is one load too many
        return true;
    }

    /// The first or second operand of the sum's patches: d1 + d2, d2 - d1; then the frame's first term less its last.
    __device__ __forceinline__ UnitSource locate(const PairUnits& units, int operand) const {
        const FrameParams& frame = sum == SHARED ? pair().any() : pair().frame[group];
        const int term = sum == SHORTCUT_SUM ? SHORTCUT_TERM
                         : sum == OWN        ? 2 * operand
                                             : pair().has(0) + (operand ^ group);
        const InputFrame input = input_frame(p, frame, term, tile);
        const Plane& plane = source().plane[Window::phase(tile)];
        return units.locate(source(), plane, p.part[input.part], input.slot, tile);
    }
};

/// Loads and transforms this thread's units of the patches of a step.
template <class Window>
struct PatchLoader {
    const ConvParams& p;
    u32 shared;  // address of the group's memory

    __device__ __forceinline__ u32 patch(int stage) const { return shared + stage * PATCH_BYTES; }
    __device__ __forceinline__ u32 other() const { return shared + 2 * PATCH_BYTES; }
    static __device__ __forceinline__ bool loads() {
        return Window::GROUP_THREADS == LOADERS || thread_now() % Window::GROUP_THREADS < LOADERS;
    }

    __device__ __forceinline__ void load(const StepCursor<Window>& at, int stage) const {
        if (!at.done() && loads()) {
            const u32 thread = thread_now() % Window::GROUP_THREADS;
            const PairUnits units(thread);
#pragma unroll
            for (int operand = 0; operand < 2; ++operand) {
                if (operand == 1 && at.sum == SHORTCUT_SUM) break;
                const u32 saved = shared + 3 * PATCH_BYTES + (operand * LOADERS + thread) * UNIT_BYTES;
                if (at.step == 0) at.locate(units, operand).store(saved);
                units.load(at.source(), UnitSource::load(saved), at.step * STEP_CHANNELS,
                           operand ? other() : patch(stage));
            }
        }
        cp_async_commit();
    }

    /// Waits for what this thread has loaded, and transforms it in place.
    __device__ __forceinline__ void transform(const StepCursor<Window>& at, int stage) const {
        cp_async_wait<0>();
        if (at.done() || at.sum == SHORTCUT_SUM || !loads()) return;
        const PairUnits units(thread_now() % Window::GROUP_THREADS);
        const float factor = Window::UP ? 0.5f : 1.0f;
        const Pair scale = pack2(factor, factor), sign = at.sum == SHARED && at.group == 0 ? scale : negate2(scale);
        // Several at a time, so that their loads overlap.
        constexpr int BATCH = Window::WIDE ? 3 : 2;
#pragma unroll
        for (int first = 0; first < PairUnits::COUNT; first += BATCH) {
            uint4 x[BATCH], y[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (!units.has(first + i)) continue;
                x[i] = load_shared_unit(patch(stage) + units.place(first + i));
                y[i] = load_shared_unit(other() + units.place(first + i));
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const uint4 sum = zip(x[i], y[i], [=](Pair a, Pair b) {
                    return add_product2(Window::UP ? multiply2(a, scale) : a, b, sign);
                });
                if (units.has(first + i)) store_shared_unit(patch(stage) + units.place(first + i), sum);
            }
        }
    }
};

/// The first group gets the sum of both groups' sums, the second the difference.
template <class Window>
__device__ __forceinline__ void exchange_sums(PairShared<Window>& shared, int group, int warp,
                                              float (&acc)[Window::WARP_ROWS][CHANNEL_BLOCKS][4]) {
    constexpr int EXCHANGED = Window::EXCHANGED, GROUP_THREADS = Window::GROUP_THREADS;
    const int other = Window::WIDE ? threadIdx.x ^ GROUP_THREADS
                                   : threadIdx.x + (group ? -GROUP_THREADS : GROUP_THREADS);
    const float sign = group ? -1.0f : 1.0f;
    const auto at = [&](int i) -> float(&)[4] { return acc[i / CHANNEL_BLOCKS][i % CHANNEL_BLOCKS]; };
#pragma unroll
    for (int i = 0; i < Window::WARP_ROWS * CHANNEL_BLOCKS; i += EXCHANGED / 4) {
        float4(&buffer)[EXCHANGED / 4][Window::BLOCK_THREADS] = shared.exchange[i / (EXCHANGED / 4) % 2];
#pragma unroll
        for (int j = 0; j < EXCHANGED / 4; ++j) {
            const float(&own)[4] = at(i + j);
            buffer[j][threadIdx.x] = make_float4(own[0], own[1], own[2], own[3]);
        }
        named_barrier(3 + warp % Window::GROUP_WARPS, 64);
#pragma unroll
        for (int j = 0; j < EXCHANGED / 4; ++j) {
            const float4 got = buffer[j][other];
            float(&own)[4] = at(i + j);
            own[0] = fmaf(own[0], sign, got.x);
            own[1] = fmaf(own[1], sign, got.y);
            own[2] = fmaf(own[2], sign, got.z);
            own[3] = fmaf(own[3], sign, got.w);
        }
    }
}

template <class Window>
__device__ __forceinline__ void convolve_pairs(const ConvParams& p) {
    using Widths = typename Window::Widths;
    constexpr int SIDE = Window::SIDE, WARP_ROWS = Window::WARP_ROWS, GROUP_WARPS = Window::GROUP_WARPS;
    extern __shared__ __align__(128) u8 memory[];
    using Shared = PairShared<Window>;
    static_assert(sizeof(Shared) == (Window::WIDE ? SHARED_BYTES : NARROW_SHARED_BYTES),
                  "dynamic shared memory of a launch");
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // The shuffle tells the compiler that a warp's numbers are the same in all its lanes.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / GROUP_WARPS;
    const int warp_row = warp % GROUP_WARPS % Window::STACKED_WARPS * WARP_ROWS;
    const int warp_channel = warp % GROUP_WARPS / Window::STACKED_WARPS * WARP_CHANNELS;
    const int a_col = lane & 15, a_unit = lane >> 4;
    const int b_lane = lane_weights(warp_channel, lane);
    const PatchLoader<Window> loader = {p, smem_address(&shared.group[group])};

    StepCursor<Window> next(p, shared.tile[warp], group);
    loader.load(next, 0);
    loader.transform(next, 0);
    int stage = 0;
    float acc[WARP_ROWS][CHANNEL_BLOCKS][4];
    const auto value = [&](int i, int block, int e) -> float& { return acc[i / 2][block][2 * (i % 2) + e]; };
    const auto epilogue_of = [&](const Tile& tile, const FrameParams& frame) {
        return EpilogueMma<2 * WARP_ROWS, Widths>{p,
                                                  tile,
                                                  frame,
                                                  lane,
                                                  make_int2(tile.x + lane / 4, tile.y + warp_row),
                                                  tile.channel_tile * Widths::COLUMNS + warp_channel};
    };
    while (!next.done()) {
        ColumnWeights<SIDE> first, second;  // of the products of a step
        first.load(next.weights + b_lane, Window::TAP_ROW_BYTES);
        // m1 is in both frames' sums, so it starts from the bias.
        const float* bias =
            bias_of<Widths>(p, next.pair().any(), next.tile, 0) + next.tile.channel_tile * Widths::COLUMNS;
#pragma unroll
        for (int n = 0; n < CHANNEL_BLOCKS; ++n) {
            float2 v = make_float2(0.0f, 0.0f);
            if (group == 0) v = load_pair_readonly(bias + warp_channel + block_channel(n, lane));
#pragma unroll
            for (int m = 0; m < WARP_ROWS; ++m) acc[m][n][0] = acc[m][n][2] = v.x, acc[m][n][1] = acc[m][n][3] = v.y;
        }
        if (Window::UP && group == 0) epilogue_of(next.tile, next.pair().any()).load_edge_bias(value);
        bool end = false;
#pragma unroll 1
        while (!end) {
            const int sum = next.sum;
            const u8* weights = next.weights + b_lane;
            end = next.advance();
            const bool last_shared = sum == SHARED && (end || next.sum == OWN);
            named_barrier(1 + group, Window::GROUP_THREADS);
            const u32 patch = loader.patch(stage) + (warp_row * PATCH_PITCH + a_col) * STEP_BYTES;
            const auto column = [&](int col) {
                return patch + col * STEP_BYTES + ((a_unit ^ (((a_col + col) >> 1) & 3)) << 4);
            };
            const auto load_next = [&](const u8* from, bool of_shortcut) {
                first.load(from, of_shortcut ? 0 : Window::TAP_ROW_BYTES);  // a shortcut has one tap
            };
            if (!Window::UP && sum == SHORTCUT_SUM) {
                loader.load(next, stage ^ 1);
                // One tap, the first of the column.
                const ColumnWeights<1>& first_tap = reinterpret_cast<const ColumnWeights<1>&>(first);
                ColumnWeights<1> second_tap;
                second_tap.load(weights + Steps<Widths>::PRODUCT_BYTES, 0);
                add_column<STEP_BYTES>(column(0), first_tap, acc);
                load_next(next.weights + b_lane, next.sum == SHORTCUT_SUM);
                add_column<STEP_BYTES>(column(0) ^ 32, second_tap, acc);
                loader.transform(next, stage ^ 1);
            } else {
#pragma unroll 1
                for (int col = 0; col < SIDE; ++col) {
                    if (col == Window::LOAD_COL) loader.load(next, stage ^ 1);
                    if (col == Window::TRANSFORM_COL) loader.transform(next, stage ^ 1);
                    second.load(weights + Steps<Widths>::PRODUCT_BYTES, Window::TAP_ROW_BYTES);
                    add_column<STEP_BYTES>(column(col), first, acc);
                    weights = col + 1 < SIDE ? weights + Window::TAP_BYTES : next.weights + b_lane;
                    load_next(weights, col + 1 == SIDE && next.sum == SHORTCUT_SUM);
                    add_column<STEP_BYTES>(column(col) ^ 32, second, acc);
                }
            }
            stage ^= 1;
            if (last_shared) exchange_sums<Window>(shared, group, warp, acc);
        }
        // Hides where it comes from. Else the compiler would keep what it derived from it.
        asm volatile("" : "+r"(next.index));
        const Tile tile(p, next.index - gridDim.x, TILE_ROWS, TILE_COLS);
        const FrameParams& frame = p.frame[2 * tile.frame + group];
        if (frame.terms == 0) continue;
        if constexpr (!Window::WIDE) {
            epilogue_of(tile, frame).store(value, nullptr);
            continue;
        }
        auto& moments = shared.moments[warp];
        epilogue_of(tile, frame).store(value, p.records ? &moments : nullptr);
        if (p.records) {
            __syncwarp();
            if (lane < WARP_CHANNELS / 4)
                store_record<1, WARP_ROWS>(p, tile, frame.record, &moments, lane, tile.x, tile.y,
                                           tile.channel_tile * TILE_CHANNELS + warp_channel);
            __syncwarp();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_mma_pair(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve_pairs<PairWindow<Wide, 3>>(p);
}

/// For the window Up.
extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_mma_pair_up(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve_pairs<PairWindow<Wide, 2>>(p);
}

extern "C" __global__ void __launch_bounds__(NARROW_THREADS, 1)
    conv_mma_pair_96(const __grid_constant__ ConvParams p) {
    begin_launch();
    convolve_pairs<PairWindow<Narrow, 3>>(p);
}
