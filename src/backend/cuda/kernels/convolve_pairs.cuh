// Pairs of frames or columns by Winograd F(2,3), for compute capability 9.0a. See mainloop_pair.cuh.
//
// A tile is 8 x 16 pixels of both frames, or of even and odd columns, by 128 or 96 output channels. Blocks are
// persistent, in clusters of two adjacent tiles. Warpgroup 0 produces: warp 0 loads patches, warp 1 loads weights,
// warps 2 and 3 transform patches. Warpgroups 1 and 2 consume: each computes 8 x 8 pixels of both frames. `p.frames`
// counts pairs, or frames whose columns are pairs; `p.tiles_x` tiles of a cluster.
#pragma once
#include "mainloop_pair.cuh"
#include "epilogue_wgmma.cuh"

constexpr int THREADS = 384;
constexpr int SHARED_BYTES = 230528;
constexpr int REGISTERS = 152, PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 200;
static_assert(128 * PRODUCER_REGISTERS + 256 * CONSUMER_REGISTERS <= THREADS * REGISTERS,
              "setmaxnreg.inc would wait for registers forever");
static_assert(THREADS * REGISTERS + CORESIDENT_THREADS * CORESIDENT_REGISTERS <= 65536,
              "no room for a co-resident block");
static_assert(TRANSFORMING_WARPS == 2, "warps 2 and 3 of the producing warpgroup");

template <class Shared>
__device__ __forceinline__ void consume(const ConvParams& p, Shared& shared, int group) {
    constexpr int COLUMNS = Shared::Widths::COLUMNS;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    PairMainloop<Shared> mainloop = {{shared, group, lane}};
    int parity = 0;
    typename PairMainloop<Shared>::Sums acc;
    for_each_pair_tile(p, [&](const Tile& tile) {
        const int2 corner = make_int2(tile.x + BLOCK_COLS * group, tile.y);
        const EpilogueWgmma<Shared> epilogue = {p, shared, tile, group, warp, lane, corner};
        const FramePair pair(p, tile);
        float2 (*moments)[CONSUMERS][COLUMNS / 4] = shared.moments[parity];
        epilogue.prefetch_bias(pair.any());
        mainloop.accumulate(p, pair, acc, [&](float (&sum)[1][COLUMNS / 2]) {
            epilogue.wait_bias();
            epilogue.add_bias(sum);
        });
        // Both residuals first: then the weights of the next tile can be loaded.
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (pair.frame[i].residual >= 0) epilogue.add_residual(acc[i], mainloop.weights);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (pair.has(i)) {
                float2* const into = p.records ? moments[i][group] : nullptr;
                epilogue.store(acc[i], pair.frame[i], into, Shared::BY_COLUMNS ? i : 0);
            }
        if constexpr (Shared::STATISTICS) {
            if (p.records) {
                named_barrier(1 + CONSUMERS, 128 * CONSUMERS);
                // One warp of each warpgroup writes the record of a frame.
                if (warp == 0 && pair.has(group))
                    epilogue.store_pair_record(pair.frame[group], moments[group], Shared::BY_COLUMNS ? group : 0);
            }
        }
        parity ^= 1;
    });
    tma_store_wait_read();
}

template <class Shared>
__device__ __forceinline__ void init_barriers(Shared& shared) {
    for (int i = 0; i < Shared::PATCH_STAGES; ++i) {
        mbarrier_init(smem_address(&shared.patch_loaded[i]), 1);
        mbarrier_init(smem_address(&shared.patch_ready[i]), TRANSFORMING_WARPS);
        mbarrier_init(smem_address(&shared.patch_empty[i]), 4 * CONSUMERS);
    }
    for (int i = 0; i < Shared::NEWER_STAGES; ++i) {
        mbarrier_init(smem_address(&shared.newer_loaded[i]), 1);
        mbarrier_init(smem_address(&shared.newer_empty[i]), TRANSFORMING_WARPS);
    }
    for (int i = 0; i < Shared::WEIGHT_STAGES; ++i) {
        mbarrier_init(smem_address(&shared.weights_full[i]), 1);
        mbarrier_init(smem_address(&shared.weights_empty[i]), 4 * CONSUMERS * PAIR_CLUSTER);
    }
    fence_mbarrier_init();
    fence_async_proxy();
}

template <class Widths, PairForm FORM>
__device__ __forceinline__ void convolve_pairs(const ConvParams& p) {
    extern __shared__ u8 memory[];
    using Shared = PairShared<Widths, FORM>;
    static_assert(sizeof(Shared) + 1023 < SHARED_BYTES, "dynamic shared memory of a launch, with alignment");
    constexpr int PIXELS = FORM == UP_FRAMES ? 9 * 17 : FORM == COLUMN_PAIRS ? 10 * 16 : 10 * 18;
    static_assert(PIXELS * PAIR_ROW_BYTES <= Shared::PATCH_BYTES, "a patch");
    static_assert(Boxes<Widths>::BYTES <= Shared::TILE_BYTES, "a residual box");
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-smem_address(memory) & 1023));
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) init_barriers(shared);
    cluster_sync();
    if (warp < 4) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce_pair_patches(p, shared);
        if (threadIdx.x == 32) produce_pair_weights(p, shared);
        if (warp >= 2) transform_patches(p, shared, threadIdx.x - 64);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(p, shared, warp / 4 - 1);
    }
    // Another block may still write to this one's shared memory or arrive at its barriers.
    cluster_sync();
}
