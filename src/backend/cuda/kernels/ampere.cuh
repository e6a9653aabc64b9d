// Instructions every card has from compute capability 8.0 on: asynchronous copies, ldmatrix, mma.sync.
#pragma once
#include "numeric.cuh"

/// 8 bytes to shared memory; zeros when not `valid`.
__device__ __forceinline__ void copy8(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

/// 16 bytes to shared memory; zeros when not `valid`.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

__device__ __forceinline__ float4 load_floats(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
    return v;
}

#ifdef VVAE_FP32
/// d (16 x 8) += a (16 x 8) * b (8 x 8), of numbers that are tf32.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// f32 as the sum of two tf32, good to 22 bits: what a tf32 holds of a number, and what it holds of the rest.
template <int COUNT>
struct Split {
    u32 high[COUNT], low[COUNT];

    __device__ __forceinline__ void set(int i, u32 value) {
        constexpr u32 TF32 = 0xffffe000u;
        high[i] = value & TF32;
        low[i] = __float_as_uint(__uint_as_float(value) - __uint_as_float(high[i])) & TF32;
    }
};

/// d (16 x 8) += a (16 x 8) * b (8 x 8). A product of two tf32 would err as much as one of two f16; three of them are as
/// good as f32. Splitting is plain arithmetic, which the compiler does once for all products of a matrix.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Split<4> left;
    Split<2> right;
#pragma unroll
    for (int i = 0; i < 4; ++i) left.set(i, a[i]);
    right.set(0, b0), right.set(1, b1);
    mma_tf32(d, left.low, right.high);
    mma_tf32(d, left.high, right.low);
    mma_tf32(d, left.high, right.high);
}

/// The same as one of thousands: tensor cores round every sum towards zero, which adds up. So the product is summed on its
/// own, and added here.
__device__ __forceinline__ void mma_long(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
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

/// The same as one of thousands: what the tensor cores' rounding adds up to is less than the element type's own.
__device__ __forceinline__ void mma_long(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma(d, a, b0, b1); }
#endif

/// Bytes of a row that one product takes: 16 elements of 2 bytes, or 8 of 4. Fragments lie in them alike.
constexpr int STEP_BYTES = 32;
