// Instructions from compute capability 8.0 on: cp.async, ldmatrix, mma.sync.
#pragma once
#include "common.cuh"

/// The thread's number, read anew: loops of products have no registers to keep what follows from it.
__device__ __forceinline__ u32 thread_now() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/// 8 bytes to shared memory; zeros if not `valid`.
__device__ __forceinline__ void cp_async_8(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

/// 16 bytes to shared memory; zeros if not `valid`.
__device__ __forceinline__ void cp_async_16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ u32 load_shared_u32(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

__device__ __forceinline__ float4 load_shared_float4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address));
    return v;
}

__device__ __forceinline__ uint4 load_shared_unit(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_unit(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

#ifdef VVAE_FP32
/// d (16 x 8) += a (16 x 8) * b (8 x 8), all operands tf32.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// f32 as the sum of two tf32, accurate to 22 bits.
template <int COUNT>
struct Tf32Split {
    u32 high[COUNT], low[COUNT];

    __device__ __forceinline__ void set(int i, u32 value) {
        constexpr u32 TF32 = 0xffffe000u;
        high[i] = value & TF32;
        low[i] = __float_as_uint(__uint_as_float(value) - __uint_as_float(high[i])) & TF32;
    }
};

/// d (16 x 8) += a (16 x 8) * b (8 x 8). One tf32 product is no better than f16; three of them match f32.
/// The split is plain arithmetic: the compiler does it once for all products of a matrix.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Tf32Split<4> left;
    Tf32Split<2> right;
#pragma unroll
    for (int i = 0; i < 4; ++i) left.set(i, a[i]);
    right.set(0, b0), right.set(1, b1);
    mma_tf32(d, left.low, right.high);
    mma_tf32(d, left.high, right.low);
    mma_tf32(d, left.high, right.high);
}

/// `mma` for sums of thousands of products. Tensor cores round towards zero, and that bias adds up. So each product
/// starts from zero, and a rounded-to-nearest addition accumulates it.
__device__ __forceinline__ void mma_long_sum(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    float sum[4] = {};
    mma(sum, a, b0, b1);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
}
#else
/// d (16 x 8) += a (16 x 16) * b (16 x 8)
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." VVAE_TYPE "." VVAE_TYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// `mma` for sums of thousands of products. The tensor cores' rounding stays below that of a 2-byte element.
__device__ __forceinline__ void mma_long_sum(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1); }
#endif

/// Bytes of a row that one product reads: 16 elements of 2 bytes or 8 of 4. Both have the same fragment layout.
constexpr int K_STEP_BYTES = 32;
