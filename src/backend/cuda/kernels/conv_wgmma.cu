// Convolution for compute capability 9.0a: TMA, mbarrier pipelines, warpgroup matrix products. conv_wgmma_down is for
// the window Down, conv_wgmma for all others, conv_wgmma_96 likewise for tiles of 96 output channels.
//
// A tile is 16 x 16 (or 8 x 32) pixels by 128 or 96 output channels; blocks are persistent. Warpgroup 0 produces: warp 0
// loads patches, warp 1 weights. Warpgroups 1 and 2 consume: each computes 8 x 16 pixels, as two blocks of 8 x 8. Eight
// adjacent pixels are the eight rows of a swizzle group, and the patch's pitch is the stride between groups. So a tap
// is just another start address.
#include "epilogue_wgmma.cuh"

constexpr int THREADS = 384;
constexpr int SHARED_BYTES = 230528;
constexpr int REGISTERS = 152, PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 208;
static_assert(128 * PRODUCER_REGISTERS + 256 * CONSUMER_REGISTERS <= THREADS * REGISTERS,
              "setmaxnreg.inc would wait for registers forever");
static_assert(THREADS * REGISTERS + CORESIDENT_THREADS * CORESIDENT_REGISTERS <= 65536,
              "no room for a co-resident block");

template <class Widths, bool DOWN>
__device__ __forceinline__ void consume(const ConvParams& p, ConvShared<Widths, DOWN>& shared, int group) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    ConvMainloop<Widths, DOWN> mainloop = {{shared, group, lane}};
    typename ConvMainloop<Widths, DOWN>::Sums acc;
    for (int index = blockIdx.x; index < Tile::count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        const FrameParams& frame = p.frame[tile.frame];
        const EpilogueWgmma<ConvShared<Widths, DOWN>> epilogue = {
            p, shared, tile, group, warp, lane, group_corner(p, tile, group)};
        // Sums do not start from the bias: writes to accumulators would serialise the products in flight.
        epilogue.prefetch_bias(frame);
        if constexpr (DOWN) epilogue.load_partial(acc);
        mainloop.accumulate(p, tile, acc);
        if (DOWN && epilogue.store_partial(acc)) {
            cp_async_wait_all();  // the unused bias must land before the next tile's goes to the same place
            continue;
        }

        epilogue.wait_bias();
        epilogue.add_bias(acc);
        // Residual boxes arrive in order. Each warpgroup must release those of the other one too.
        const bool residual = frame.residual >= 0;
        if (residual && group == 1) epilogue.skip_residual(mainloop.weights);
        if (residual) epilogue.add_residual(acc, mainloop.weights);
        epilogue.store(acc, frame, epilogue.group_record());
        if (residual && group == 0) epilogue.skip_residual(mainloop.weights);
    }
    tma_store_wait_read();
}

/// `DOWN`: see ConvShared.
template <class Widths, bool DOWN>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ u8 memory[];
    using Shared = ConvShared<Widths, DOWN>;
    static_assert(sizeof(Shared) + 1023 < SHARED_BYTES, "dynamic shared memory of a launch, with alignment");
    static_assert((DOWN ? 9 * 33 : 10 * 34) * Widths::ROW <= Shared::PATCH_BYTES, "a patch of the larger tile");
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-smem_address(memory) & 1023));
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < Shared::PATCH_STAGES; ++i) {
            mbarrier_init(smem_address(&shared.patch_full[i]), 1);
            mbarrier_init(smem_address(&shared.patch_empty[i]), 4 * CONSUMERS);
        }
        for (int i = 0; i < Shared::WEIGHT_STAGES; ++i) {
            mbarrier_init(smem_address(&shared.weights_full[i]), 1);
            mbarrier_init(smem_address(&shared.weights_empty[i]), 4 * CONSUMERS);
        }
        fence_async_proxy();
    }
    __syncthreads();
    begin_launch();
    if (warp < 4) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce_patches(p, shared);
        if (threadIdx.x == 32) produce_weights(p, shared);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(p, shared, warp / 4 - 1);
    }
}

extern "C" __global__ void __maxnreg__(REGISTERS) conv_wgmma(const __grid_constant__ ConvParams p) {
    convolve<Wide, false>(p);
}

extern "C" __global__ void __maxnreg__(REGISTERS) conv_wgmma_down(const __grid_constant__ ConvParams p) {
    convolve<Wide, true>(p);
}

extern "C" __global__ void __maxnreg__(REGISTERS) conv_wgmma_96(const __grid_constant__ ConvParams p) {
    convolve<Narrow, false>(p);
}
