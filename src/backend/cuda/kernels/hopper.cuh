// Instructions of compute capability 9.0a: mbarrier, TMA, stmatrix, wgmma, setmaxnreg.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the barrier that has this address in block `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/// Position in a pipeline of `STAGES` buffers. `parity` is the phase of the stage's barriers.
template <int STAGES>
struct PipelineState {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/// A box from global to shared memory; zeros outside the tensor.
__device__ __forceinline__ void tma_load_4d(u32 to, const void* map, int channel, int x, int y, int slot, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(channel), "r"(x), "r"(y), "r"(slot), "r"(barrier)
        : "memory");
}

/// The same to this address in every block of the cluster named by `blocks`, each with its own barrier.
__device__ __forceinline__ void tma_load_4d_multicast(u32 to, const void* map, int channel, int x, int y, int slot,
                                                      u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(channel), "r"(x), "r"(y), "r"(slot), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/// The same to this address in every block of the cluster named by `blocks`, each with its own barrier.
__device__ __forceinline__ void bulk_load_multicast(u32 to, const void* from, u32 bytes, u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
        : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// All threads of the cluster that have not exited.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/// Makes initialised barriers visible to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// A box from shared to global memory. Elements outside the tensor are not written.
__device__ __forceinline__ void tma_store_5d(const void* map, int c0, int c1, int c2, int c3, int c4, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(from)
        : "memory");
}

/// Ends a group of TMA stores, which may be empty.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until all TMA stores of this thread have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/// Stores four 8 x 8 matrices from mma fragments. Lane 8k+r passes the address of row r of matrix k.
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

/// Makes plain stores to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/// A K-major matrix of rows of 128 or 64 bytes, in the swizzle of that width. Groups of 8 rows are `group_bytes` apart.
/// The swizzle follows address bits, so a matrix may start at any row of a swizzled region.
template <int ROW = 128>
__device__ __forceinline__ u64 matrix_descriptor(u32 group_bytes) {
    static_assert(ROW == 128 || ROW == 64);
    return ((ROW == 128 ? 1ull : 2ull) << 62) | (static_cast<u64>(group_bytes >> 4) << 32) | (1ull << 16);
}

__device__ __forceinline__ u64 matrix_at(u64 descriptor, u32 address) {
    return descriptor | ((address & 0x3ffff) >> 4);
}

/// The same for a matrix with its outer dimension contiguous: `block_bytes` from 64 columns to the next.
__device__ __forceinline__ u64 transposed_descriptor(u32 group_bytes, u32 block_bytes) {
    return (1ull << 62) | (static_cast<u64>(group_bytes >> 4) << 32) | (static_cast<u64>(block_bytes >> 4) << 16);
}

__device__ __forceinline__ void cp_async_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/// x += y. Volatile, so the compiler does not delay it and hold `y` in a register meanwhile.
__device__ __forceinline__ void add_now(float& x, float y) {
    asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
}

/// d (64 x 128, f32) = a (64 x 16) * b (128 x 16, transposed) + (scale_d ? d : 0). With `ROWS`, the rows of b (16 x
/// 128) are contiguous instead.
template <int ROWS = 0>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[64], u64 a, u64 b, int scale_d) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." VVAE_TYPE "." VVAE_TYPE
        " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, %67;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(scale_d), "n"(ROWS));
}

/// The same with 96 columns: d (64 x 96) = a (64 x 16) * b (96 x 16, transposed) + (scale_d ? d : 0).
__device__ __forceinline__ void wgmma_m64n96k16(float (&d)[48], u64 a, u64 b, int scale_d) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32." VVAE_TYPE "." VVAE_TYPE
        " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "l"(a), "l"(b), "r"(scale_d));
}

/// One step of 16 input channels, for 64 pixels by as many columns as `d` has.
__device__ __forceinline__ void wgmma_k16(float (&d)[64], u64 a, u64 b, int scale_d) {
    wgmma_m64n128k16(d, a, b, scale_d);
}
__device__ __forceinline__ void wgmma_k16(float (&d)[48], u64 a, u64 b, int scale_d) {
    wgmma_m64n96k16(d, a, b, scale_d);
}
