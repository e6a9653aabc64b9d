// Mainloop of conv_wgmma_pair, conv_wgmma_pair_96 and conv_wgmma_pair_up: two adjacent output frames by Winograd F(2,3)
// in time. And of conv_wgmma_columns: two adjacent columns of a frame, likewise along its rows.
//
//     m0 = U0 (d0 - d2)    m1 = U1 (d1 + d2)    m2 = U2 (d2 - d1)    m3 = U3 (d1 - d3)
//     first frame = m0 + m1 + m2        second frame = m1 - m2 - m3
//
// d0 to d3 are the input frames, or columns, of both, U0 to U3 sums of the weights. m1 and m2 are summed apart, over
// all channels and taps; then their sum and their difference; then m0 and -m3 come on top. So two accumulators
// suffice, and each frame's sum has the same products in the same order if the other frame is missing.
//
// A stage holds 32 channels of two patches, a tile of weights 32 channels of two slabs. So products of both sums take
// turns, and none waits for the one before. Patches are loaded as they are. The transforming warps add and subtract
// them in place.
//
// With the window Up the input is not normalised. Sums of two frames might leave the range of f16, so they are halved;
// the weights are packed twice as large.
#pragma once
#include "mainloop_wgmma.cuh"

constexpr int PAIR_CLUSTER = 2;        // adjacent blocks, which share each tile of weights
constexpr int PAIR_CHANNELS = 32;      // of a patch
constexpr int PAIR_ROW_BYTES = 64;     // of a pixel in a patch
constexpr int TRANSFORMING_WARPS = 2;  // of the producing warpgroup

/// What is computed in pairs: frames with 3 x 3 taps; frames with 2 x 2 taps for each phase; columns of a frame, with 3
/// taps below each other.
enum PairForm { SAME_FRAMES, UP_FRAMES, COLUMN_PAIRS };

template <class Widths_, PairForm FORM>
struct PairShared {
    using Widths = Widths_;
    static constexpr bool UP = FORM == UP_FRAMES, BY_COLUMNS = FORM == COLUMN_PAIRS, WIDE = Widths::ROW == 128;
    static constexpr bool STATISTICS = WIDE;
    // One of the two slabs in a tile of weights, and that tile.
    static constexpr int SLAB_TILE_BYTES = Widths::COLUMNS * PAIR_ROW_BYTES, TILE_BYTES = 2 * SLAB_TILE_BYTES;
    static constexpr int SHORTCUT_STEPS = Widths::CHANNELS / PAIR_CHANNELS;  // whose weights share a tile
    static constexpr int FRAMES = 2;
    static constexpr int PATCH_STAGES = 3;
    static constexpr int WEIGHT_STAGES = WIDE ? 5 : 7;
    // 10 x 18, 9 x 17 or 10 x 16 pixels, rounded up to the swizzle's 512 bytes.
    static constexpr int PATCH_BYTES = (FORM == SAME_FRAMES ? 23 : 20) * 512;
    // The products of few taps end before the next patch to be subtracted could arrive. So two are in flight.
    static constexpr int NEWER_STAGES = FORM == SAME_FRAMES ? 1 : 2;
    static constexpr int EDGES = UP ? 4 : 1;  // each has a bias

    u8 weights[WEIGHT_STAGES][TILE_BYTES];  // weight tiles, then the residual boxes of a tile
    u8 out[CONSUMERS][TILE_BYTES];
    u8 patch[PATCH_STAGES][2][PATCH_BYTES];
    u8 newer[NEWER_STAGES][2][PATCH_BYTES];  // patches of d2 and d3, to be subtracted from those of d0 and d1
    // `loaded`: the copies have arrived. `ready`: the patches are transformed. `empty`: nobody reads them any more.
    u64 patch_loaded[PATCH_STAGES], patch_ready[PATCH_STAGES], patch_empty[PATCH_STAGES];
    u64 newer_loaded[NEWER_STAGES], newer_empty[NEWER_STAGES];
    u64 weights_full[WEIGHT_STAGES], weights_empty[WEIGHT_STAGES];
    float bias[CONSUMERS][EDGES][Widths::COLUMNS];
    // [parity of the tile][frame][warpgroup]: mean and M2 of quads
    float2 moments[2][2][CONSUMERS][Widths::COLUMNS / 4];

    /// Steps of PAIR_CHANNELS channels of a source.
    static __device__ __forceinline__ int steps(const Source& source) {
        return source.k_blocks * (Widths::CHANNELS / PAIR_CHANNELS);
    }

    /// The other blocks of the cluster may load the next tile here, too.
    static __device__ __forceinline__ void release_weights(u32 barrier, int lane) {
        if (lane < PAIR_CLUSTER) mbarrier_arrive_at(barrier, lane);
    }
};

/// Calls `visit(tile)` for each tile of a block. Blocks of a cluster have adjacent tiles of one row.
template <class Visit>
__device__ __forceinline__ void for_each_pair_tile(const ConvParams& p, Visit visit) {
    for (int index = blockIdx.x / PAIR_CLUSTER; index < Tile::count(p); index += gridDim.x / PAIR_CLUSTER) {
        Tile tile(p, index, GROUP_ROWS, GROUP_COLS * PAIR_CLUSTER);
        tile.x += GROUP_COLS * cluster_rank();
        visit(tile);
    }
}

/// The thread that loads patches.
template <class Shared>
struct PairPatchProducer {
    const ConvParams& p;
    Shared& shared;
    PipelineState<Shared::PATCH_STAGES> patches = {};
    PipelineState<Shared::NEWER_STAGES> newer = {};

    /// Where a term of a frame is, and how far to the right of the tile. With pairs of columns, d0 to d3 are columns of
    /// one frame: the odd one to the left of both, both, and the even one to the right.
    __device__ __forceinline__ InputFrame locate(const Tile& tile, const FrameParams& frame, int term, int& dx) const {
        if (!Shared::BY_COLUMNS) return input_frame(p, frame, term, tile);
        const int view = &frame - (p.frame + 2 * tile.frame), d = term + view;
        if (term == SHORTCUT_TERM) return {view ? SHORTCUT_ODD : SHORTCUT, frame.slot[SHORTCUT_TERM]};
        dx = (d + 1) / 2 - 1;
        return {d % 2 ? MAIN : MAIN_ODD, frame.slot[0]};
    }

    /// A step of one term of each frame. Frames without a term load nothing.
    __device__ __forceinline__ void load(const Tile& tile, const Source& source, int step,
                                         const FrameParams* const (&frame)[2], const int (&term)[2],
                                         u8 (&to)[2][Shared::PATCH_BYTES], u32 loaded) const {
        const Plane& plane = source.plane[Shared::UP ? tile.phase : 0];
        mbarrier_arrive_expect_tx(loaded, source.patch_bytes * ((frame[0] != nullptr) + (frame[1] != nullptr)));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!frame[i]) continue;
            int dx = plane.dx;
            const InputFrame input = locate(tile, *frame[i], term[i], dx);
            tma_load_4d(smem_address(to[i]), &p.input_map[input.part], step * PAIR_CHANNELS,
                        tile.x + dx - p.part[input.part].first_column, tile.y + plane.dy, input.slot, loaded);
        }
    }

    __device__ __forceinline__ void load_patches(const Tile& tile, const Source& source, int step,
                                                 const FrameParams* const (&frame)[2], const int (&term)[2]) {
        const int stage = patches.stage;
        mbarrier_wait(smem_address(&shared.patch_empty[stage]), patches.parity ^ 1);
        load(tile, source, step, frame, term, shared.patch[stage], smem_address(&shared.patch_loaded[stage]));
        patches.advance();
    }

    __device__ __forceinline__ void load_newer(const Tile& tile, const Source& source, int step,
                                               const FrameParams* const (&frame)[2]) {
        const int stage = newer.stage;
        mbarrier_wait(smem_address(&shared.newer_empty[stage]), newer.parity ^ 1);
        load(tile, source, step, frame, {2, 2}, shared.newer[stage], smem_address(&shared.newer_loaded[stage]));
        newer.advance();
    }
};

template <class Shared>
__device__ __forceinline__ void produce_pair_patches(const ConvParams& p, Shared& shared) {
    PairPatchProducer<Shared> producer = {p, shared};
    for_each_pair_tile(p, [&](const Tile& tile) {
        const FramePair pair(p, tile);
        const FrameParams* any = &pair.any();
        const FrameParams* const both[2] = {any, any};
        const FrameParams* const each[2] = {pair.has(0) ? pair.frame : nullptr, pair.has(1) ? pair.frame + 1 : nullptr};
        // Terms of the first frame are d0, d1 and d2, those of the second d1, d2 and d3.
        const int d1 = pair.has(0), steps = Shared::steps(p.source[0]);
        for (int step = 0; step < steps; ++step) producer.load_patches(tile, p.source[0], step, both, {d1, d1 + 1});
        for (int step = 0; step < steps; ++step) {
            producer.load_newer(tile, p.source[0], step, each);
            producer.load_patches(tile, p.source[0], step, each, {0, 0});
        }
        if (any->slot[SHORTCUT_TERM] < 0) return;
        for (int step = 0; step < Shared::steps(p.source[1]); ++step)
            producer.load_patches(tile, p.source[1], step, each, {SHORTCUT_TERM, SHORTCUT_TERM});
    });
}

/// The warps that transform patches in shared memory. A unit has the same place in every patch.
template <class Shared>
struct PairTransform {
    static constexpr bool UP = Shared::UP;
    Shared& shared;
    int thread, units;
    PipelineState<Shared::PATCH_STAGES> patches = {};
    PipelineState<Shared::NEWER_STAGES> newer = {};

    static __device__ __forceinline__ Pair sum(Pair x, Pair y) {
        return UP ? add_product2(multiply2(x, HALVES), y, HALVES) : add2(x, y);
    }
    static __device__ __forceinline__ Pair difference(Pair x, Pair y) {
        return UP ? add_product2(multiply2(x, HALVES), y, negate2(HALVES)) : subtract2(x, y);
    }

    /// Calls `transform(x, y)` for each unit of the two patches of the next stage.
    template <class Transform>
    __device__ __forceinline__ void next_stage(Transform transform) {
        const int stage = patches.stage;
        mbarrier_wait(smem_address(&shared.patch_loaded[stage]), patches.parity);
        uint4* const x = reinterpret_cast<uint4*>(shared.patch[stage][0]);
        uint4* const y = reinterpret_cast<uint4*>(shared.patch[stage][1]);
#pragma unroll 2
        for (int at = thread; at < units; at += 32 * TRANSFORMING_WARPS) transform(at, x[at], y[at]);
        // What this warp wrote is visible to the products from here on.
        fence_async_proxy();
        __syncwarp();
        if (thread % 32 == 0) mbarrier_arrive(smem_address(&shared.patch_ready[stage]));
        patches.advance();
    }

    /// d1 + d2 and d2 - d1.
    __device__ __forceinline__ void sum_and_difference() {
        next_stage([&](int, uint4& x, uint4& y) {
            const uint4 d1 = x, d2 = y;
            x = zip(d1, d2, sum);
            y = zip(d2, d1, difference);
        });
    }

    /// d0 - d2 and d1 - d3.
    __device__ __forceinline__ void differences() {
        mbarrier_wait(smem_address(&shared.newer_loaded[newer.stage]), newer.parity);
        const uint4* const d2 = reinterpret_cast<const uint4*>(shared.newer[newer.stage][0]);
        const uint4* const d3 = reinterpret_cast<const uint4*>(shared.newer[newer.stage][1]);
        next_stage([&](int at, uint4& x, uint4& y) {
            x = zip(x, d2[at], difference);
            y = zip(y, d3[at], difference);
        });
        if (thread % 32 == 0) mbarrier_arrive(smem_address(&shared.newer_empty[newer.stage]));
        newer.advance();
    }

    __device__ __forceinline__ void pass() {
        next_stage([](int, uint4&, uint4&) {});
    }
};

template <class Shared>
__device__ __forceinline__ void transform_patches(const ConvParams& p, Shared& shared, int thread) {
    PairTransform<Shared> transform = {shared, thread, p.source[0].patch_bytes / UNIT_BYTES};
    for_each_pair_tile(p, [&](const Tile& tile) {
        const int steps = Shared::steps(p.source[0]);
        for (int step = 0; step < steps; ++step) transform.sum_and_difference();
        for (int step = 0; step < steps; ++step) transform.differences();
        if (FramePair(p, tile).any().slot[SHORTCUT_TERM] < 0) return;
        for (int step = 0; step < Shared::steps(p.source[1]); ++step) transform.pass();
    });
}

/// The thread that loads weights.
template <class Shared>
struct PairWeightProducer {
    Shared& shared;
    PipelineState<Shared::WEIGHT_STAGES> pipe = {};

    /// Waits until the stage is free, and calls `load(to, full)` to fill it.
    template <class Load>
    __device__ __forceinline__ void fill(u32 bytes, Load load) {
        mbarrier_wait(smem_address(&shared.weights_empty[pipe.stage]), pipe.parity ^ 1);
        const u32 full = smem_address(&shared.weights_full[pipe.stage]);
        mbarrier_arrive_expect_tx(full, bytes);
        load(smem_address(shared.weights[pipe.stage]), full);
        pipe.advance();
    }

    /// `bytes` of a tile, from `first` on. Each block of a cluster loads its share for all of them.
    __device__ __forceinline__ void load_tile(const u8* tile, u32 first, u32 bytes) {
        const u32 offset = first + cluster_rank() * (bytes / PAIR_CLUSTER);
        fill(bytes, [&](u32 to, u32 full) {
            bulk_load_multicast(to + offset, tile + offset, bytes / PAIR_CLUSTER, full, (1 << PAIR_CLUSTER) - 1);
        });
    }
};

/// Weights of a tile, then its residual.
template <class Shared>
__device__ __forceinline__ void produce_pair_weights(const ConvParams& p, Shared& shared) {
    using Widths = typename Shared::Widths;
    PairWeightProducer<Shared> producer = {shared};
    for_each_pair_tile(p, [&](const Tile& tile) {
        const FramePair pair(p, tile);
        const Source& source = p.source[0];
        const int tiles = Shared::steps(source) * source.taps;
        const u32 first = pair.has(0) ? 0 : Shared::SLAB_TILE_BYTES;
        const u32 bytes = pair.has(0) && pair.has(1) ? Shared::TILE_BYTES : Shared::SLAB_TILE_BYTES;
        for (int half = 0; half < 2; ++half) {
            const i64 first_tile =
                ((Shared::UP ? half * p.phases + tile.phase : half) * p.channel_tiles + tile.channel_tile) * 2;
            const u8* from = source.weights + first_tile * source.k_blocks * source.taps * Widths::BYTES;
#pragma unroll 1
            for (int i = 0; i < tiles; ++i)
                producer.load_tile(from + static_cast<i64>(i) * Shared::TILE_BYTES, half ? first : 0,
                                   half ? bytes : Shared::TILE_BYTES);
        }
        if (pair.any().slot[SHORTCUT_TERM] >= 0) {
            const u8* from = weight_tiles<Widths>(p, p.source[1], true, 0, tile);
            for (int step = 0; step < Shared::steps(p.source[1]); ++step)
                producer.load_tile(from + step / Shared::SHORTCUT_STEPS * Widths::BYTES, 0, Widths::BYTES);
        }
#pragma unroll 1
        for (int box = 0; box < 2 * Boxes<Widths>::COUNT; ++box) {
            const int slot = pair.frame[box / Boxes<Widths>::COUNT].residual;
            if (slot < 0) continue;
            producer.fill(Boxes<Widths>::BYTES, [&](u32 to, u32 full) {
                tma_load_4d(to, &p.residual_map[Shared::BY_COLUMNS ? box / Boxes<Widths>::COUNT : 0],
                            tile.channel_tile * Widths::COLUMNS + box % Boxes<Widths>::COUNT * Widths::CHANNELS, tile.x,
                            tile.y, slot, full);
            });
        }
    });
}

template <class Shared>
struct PairMainloop : ConsumerPipelines<Shared> {
    using Sums = float[2][1][Shared::Widths::COLUMNS / 2];  // of both frames
    using Pipelines = ConsumerPipelines<Shared>;
    using Pipelines::group, Pipelines::patches, Pipelines::shared, Pipelines::used_patch, Pipelines::used_weights,
        Pipelines::weights;
    // The next tap in the patch, and how to go on from it.
    u64 a = 0;
    int taps = 0, col = 0, cols = 0, next_row = 0;

    __device__ __forceinline__ void enter_patch(const Source& source) {
        const u32 patch = smem_address(shared.patch[patches.stage][0]) + group * BLOCK_COLS * PAIR_ROW_BYTES;
        a = matrix_at(matrix_descriptor<PAIR_ROW_BYTES>(source.pitch * PAIR_ROW_BYTES), patch);
        taps = source.taps, cols = source.plane[0].cols, col = 0;
        next_row = (source.pitch - cols) * (PAIR_ROW_BYTES / 16);
        mbarrier_wait(smem_address(&shared.patch_ready[patches.stage]), patches.parity);
    }

    /// Adds the products of a tap to the sum of each frame that is there. Those of the tap before may be in flight
    /// until then. `ROW`: bytes of an output channel in the tile of weights. `b0`, `b1`: where the weights of each sum
    /// begin in it.
    template <bool FIRST, bool SECOND, int ROW>
    __device__ __forceinline__ void add_tap(int scale_d, int b0, int b1, Sums& acc) {
        const u64 b = matrix_at(matrix_descriptor<ROW>(8 * ROW), smem_address(shared.weights[weights.stage]));
        constexpr int SECOND_PATCH = Shared::PATCH_BYTES / 16;
        mbarrier_wait(smem_address(&shared.weights_full[weights.stage]), weights.parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PAIR_CHANNELS / 16; ++k) {
            if (FIRST) wgmma_k16(acc[0][0], a + 2 * k, b + b0 + 2 * k, scale_d);
            if (SECOND) wgmma_k16(acc[1][0], a + SECOND_PATCH + 2 * k, b + b1 + 2 * k, scale_d);
            scale_d = 1;
        }
        wgmma_commit();
        wgmma_wait<1>();
        this->release_used();
        used_weights = smem_address(&shared.weights_empty[weights.stage]);
        weights.advance();
        a += PAIR_ROW_BYTES / 16;
        if (++col == cols) col = 0, a += next_row;
        if (--taps > 0) return;
        used_patch = smem_address(&shared.patch_empty[patches.stage]);
        patches.advance();
    }

    /// All taps of all patches. The first tap stands before the loop over the others: where a loop begins, products in
    /// flight must not meet accumulators that plain instructions wrote (C7515).
    template <bool FIRST, bool SECOND, bool OVERWRITE>
    __device__ __forceinline__ void add_patches(const Source& source, Sums& acc) {
        int steps = Shared::steps(source);
        const auto next_tap = [&](int scale_d) {
            if (taps == 0) {
                enter_patch(source);
                --steps;
            }
            add_tap<FIRST, SECOND, PAIR_ROW_BYTES>(scale_d, 0, Shared::SLAB_TILE_BYTES / 16, acc);
        };
        next_tap(OVERWRITE ? 0 : 1);
#pragma unroll 1
        while (taps > 0 || steps > 0) next_tap(1);
    }

    /// The shortcut: one tap, and the same weights for both frames. A wide tile of weights has the channels of two steps.
    template <bool FIRST, bool SECOND>
    __device__ __forceinline__ void add_shortcut(const Source& source, Sums& acc) {
#pragma unroll 1
        for (int step = 0; step < Shared::steps(source); ++step) {
            enter_patch(source);
            const int b = step % Shared::SHORTCUT_STEPS * (PAIR_ROW_BYTES / 16);
            add_tap<FIRST, SECOND, Shared::Widths::ROW>(1, b, b, acc);
        }
    }

    template <bool FIRST, bool SECOND>
    __device__ __forceinline__ void add_own_terms(const ConvParams& p, bool shortcut, Sums& acc) {
        add_patches<FIRST, SECOND, false>(p.source[0], acc);
        if (shortcut) add_shortcut<FIRST, SECOND>(p.source[1], acc);
        this->drain();
    }

    /// The sums of a tile. `add_bias(sum)` is called with m1, which is in both frames' sums.
    template <class AddBias>
    __device__ __forceinline__ void accumulate(const ConvParams& p, const FramePair& pair, Sums& acc,
                                               AddBias add_bias) {
        add_patches<true, true, true>(p.source[0], acc);
        this->drain();
        add_bias(acc[0]);
#pragma unroll
        for (int e = 0; e < Shared::Widths::COLUMNS / 2; ++e) sum_and_difference(acc[0][0][e], acc[1][0][e]);
        const bool shortcut = pair.any().slot[SHORTCUT_TERM] >= 0;
        if (pair.has(0) && pair.has(1)) add_own_terms<true, true>(p, shortcut, acc);
        else if (pair.has(0)) add_own_terms<true, false>(p, shortcut, acc);
        else add_own_terms<false, true>(p, shortcut, acc);
    }
};
