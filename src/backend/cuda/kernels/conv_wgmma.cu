// Convolution for compute capability 9.0a: copy engine, mbarrier pipelines and warpgroup matrix products.
//
// A tile is 16 x 16 (or 8 x 32) pixels by 128 output channels. Warpgroup 0 feeds: warp 0 fetches patches, warp 1 weights.
// Warpgroups 1 and 2 compute 8 x 16 pixels each, as two blocks of 8 x 8: eight pixels side by side are the eight rows
// of a swizzle group, and the pitch of the patch is the distance between groups, so a tap is nothing but another
// start address.
//
// There are two kernels. Sums of the second may begin with those of another launch, and be left for one; as accumulators are then
// written before the first product, the assembler would wait for each product if any were in flight from one tap to the next.
#include "wgmma_finish.cuh"

// A multiprocessor's registers are enough for these threads and 128 others with 56 each: what comes from the copy engines and from
// the layer before is made ready for the next band of rows beside a band that computes.
constexpr int THREADS = 384, REGISTERS = 152, FEEDING = 40, COMPUTING = 208;
static_assert(128 * FEEDING + 256 * COMPUTING <= THREADS * REGISTERS, "registers that computing threads would wait for");
static_assert(sizeof(Shared) + 1023 < 230528, "the shared memory that a launch asks for");

/// The sum of a tile's products; with `SUMS`, of what is in `acc` too. `patches` and `weights` say where in the rings it begins.
template <bool SUMS>
__device__ __forceinline__ void sum(const ConvParams& p, Shared& shared, const Tile& tile, int group, int lane,
                                    Ring<PATCH_STAGES>& patches, Ring<WEIGHT_STAGES>& weights, float (&acc)[2][64]) {
    int accumulate = SUMS;
    constexpr int NEXT = ROW / 16;  // row of a matrix, in a descriptor's units
    const u64 weights_descriptor = matrix_descriptor(1024);
    u32 used_weights = 0, used_patch = 0;  // barriers to arrive at once the products in flight have read them
    for_each_patch(p, tile, [&](const Step& step) {
        const int pitch = step.source.pitch, rows = step.plane.rows, cols = step.plane.cols;
        const int first = group * (p.tile_rows == 16 ? 8 * pitch : 16);
        u64 a = matrix_at(matrix_descriptor(pitch * 128), smem_address(shared.patch[patches.stage]) + first * 128);
        barrier_wait(smem_address(&shared.patch_full[patches.stage]), patches.parity);
        for (int row = 0; row < rows; ++row, a += (pitch - cols) * NEXT)
            for (int col = 0; col < cols; ++col, a += NEXT) {
                const u64 b = matrix_at(weights_descriptor, smem_address(shared.weights[weights.stage]));
                barrier_wait(smem_address(&shared.weights_full[weights.stage]), weights.parity);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < CHUNK / 16; ++k) {
                    wgmma_m64n128k16(acc[0], a + 2 * k, b + 2 * k, accumulate);
                    wgmma_m64n128k16(acc[1], a + 2 * k + 8 * NEXT, b + 2 * k, accumulate);
                    accumulate = 1;
                }
                wgmma_commit();
                wgmma_wait<SUMS ? 0 : 1>();
                if (lane == 0 && used_weights) barrier_arrive(used_weights);
                if (lane == 0 && used_patch) barrier_arrive(used_patch);
                used_weights = smem_address(&shared.weights_empty[weights.stage]);
                used_patch = 0;
                weights.next();
            }
        used_patch = smem_address(&shared.patch_empty[patches.stage]);
        patches.next();
    });
    wgmma_wait<0>();
    if (lane == 0) {
        barrier_arrive(used_weights);
        barrier_arrive(used_patch);
    }
}

template <bool SUMS>
__device__ __forceinline__ void compute(const ConvParams& p, Shared& shared, int group) {
    Ring<PATCH_STAGES> patches;
    Ring<WEIGHT_STAGES> weights;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int parity = 0;
    float acc[2][64];
    for (int index = blockIdx.x; index < Tile::count(p); index += gridDim.x) {
        const Tile tile = tile_at(p, index);
        const Finish finish = {p, shared, tile, group, warp, lane, group_corner(p, tile, group)};
        // The bias would be a fine start for the sums, but products in flight bear no other writes to their registers.
        finish.fetch_bias();
        if constexpr (SUMS) finish.load_sums(acc);
        sum<SUMS>(p, shared, tile, group, lane, patches, weights, acc);
        if (SUMS && finish.leave_sums(acc)) {
            wait_copies();  // of a bias that nobody needs, before the next tile's goes to the same place
            continue;
        }

        finish.add_bias(acc);
        // The residual's boxes come in order, and each warpgroup has to see and release those of the other as well.
        const bool residual = p.frame[tile.frame].residual >= 0;
        if (residual && group == 1) finish.pass_box(weights), finish.pass_box(weights);
        if (residual) finish.add_residual(acc, weights);
        finish.store(acc, p.partials ? shared.sums[parity] + 4 * group : nullptr);
        if (residual && group == 0) finish.pass_box(weights), finish.pass_box(weights);
        parity ^= 1;
    }
    wait_boxes_read();
}

template <bool SUMS>
__device__ __forceinline__ void convolve(const ConvParams& p) {
    extern __shared__ u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-smem_address(memory) & 1023));
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PATCH_STAGES; ++i) {
            barrier_init(smem_address(&shared.patch_full[i]), 1);
            barrier_init(smem_address(&shared.patch_empty[i]), 8);
        }
        for (int i = 0; i < WEIGHT_STAGES; ++i) {
            barrier_init(smem_address(&shared.weights_full[i]), 1);
            barrier_init(smem_address(&shared.weights_empty[i]), 8);
        }
        fence_async_proxy();
    }
    __syncthreads();
    if (warp < 4) {
        registers_shrink<FEEDING>();
        if (threadIdx.x == 0) feed_patches(p, shared);
        if (threadIdx.x == 32) feed_weights(p, shared);
    } else {
        registers_grow<COMPUTING>();
        compute<SUMS>(p, shared, warp / 4 - 1);
    }
}

extern "C" __global__ void __maxnreg__(REGISTERS) conv_wgmma(const __grid_constant__ ConvParams p) { convolve<false>(p); }

extern "C" __global__ void __maxnreg__(REGISTERS) conv_wgmma_sums(const __grid_constant__ ConvParams p) { convolve<true>(p); }
