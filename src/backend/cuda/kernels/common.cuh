// Element type, conversions and global loads of every kernel. Elements are f16; bf16 with -DVVAE_BF16; f32 with
// -DVVAE_FP32. Uses PTX only, so NVRTC needs no toolkit header.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int MAX_FRAMES = 32;  // frames of one launch

struct alignas(64) TensorMap {
    u64 opaque[16];
};

/// Every kernel calls this before it touches memory. Waits until the launch before has ended and its writes can be
/// seen, and then lets blocks of the next launch begin, which wait here in turn. So launches keep their order, and the
/// next one's blocks are in place when this one ends. Older cards have no such launches.
__device__ __forceinline__ void begin_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// `Element` is one number as stored in memory. `Pair` is two adjacent ones.
#ifdef VVAE_FP32
typedef float Element;
typedef float2 Pair;

__device__ __forceinline__ Pair pack2(float lo, float hi) { return make_float2(lo, hi); }
__device__ __forceinline__ float2 unpack2(Pair pair) { return pair; }
__device__ __forceinline__ Element pack1(float value) { return value; }
__device__ __forceinline__ float unpack1(Element value) { return value; }
#else
typedef u16 Element;
typedef u32 Pair;

#ifdef VVAE_BF16
#define VVAE_TYPE "bf16"
constexpr Pair ONES = 0x3f803f80, HALVES = 0x3f003f00;
#else
#define VVAE_TYPE "f16"
constexpr Pair ONES = 0x3c003c00, HALVES = 0x38003800;
#endif

/// Rounds both to nearest even. `lo` goes to the lower address.
__device__ __forceinline__ Pair pack2(float lo, float hi) {
    u32 packed;
    asm("cvt.rn." VVAE_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}

__device__ __forceinline__ float2 unpack2(Pair packed) {
    float2 pair;
#ifdef VVAE_BF16
    pair.x = __uint_as_float(packed << 16);
    pair.y = __uint_as_float(packed & 0xffff0000u);
#else
    asm("{ .reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
#endif
    return pair;
}

/// x + y and x - y, each rounded once.
__device__ __forceinline__ Pair add2(Pair x, Pair y) {
    Pair sum;
    asm("add.rn." VVAE_TYPE "x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
    return sum;
}

__device__ __forceinline__ Pair subtract2(Pair x, Pair y) {
    Pair difference;
    asm("sub.rn." VVAE_TYPE "x2 %0, %1, %2;" : "=r"(difference) : "r"(x), "r"(y));
    return difference;
}

/// x + y * z, rounded once.
__device__ __forceinline__ Pair add_product2(Pair x, Pair y, Pair z) {
    Pair sum;
    asm("fma.rn." VVAE_TYPE "x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(y), "r"(z), "r"(x));
    return sum;
}

__device__ __forceinline__ Pair multiply2(Pair x, Pair y) {
    Pair product;
    asm("fma.rn." VVAE_TYPE "x2 %0, %1, %2, %3;" : "=r"(product) : "r"(x), "r"(y), "r"(0x80008000u));
    return product;
}

__device__ __forceinline__ Pair negate2(Pair x) { return x ^ 0x80008000u; }

/// `op` of each pair of two units.
template <class Op>
__device__ __forceinline__ uint4 zip(uint4 x, uint4 y, Op op) {
    return make_uint4(op(x.x, y.x), op(x.y, y.y), op(x.z, y.z), op(x.w, y.w));
}

__device__ __forceinline__ Element pack1(float value) { return static_cast<u16>(pack2(value, 0.0f)); }
__device__ __forceinline__ float unpack1(Element value) { return unpack2(value).x; }
#endif

constexpr int ELEMENT_BYTES = sizeof(Element);
constexpr int UNIT_BYTES = 16;  // a unit: the widest load or store of a thread
constexpr int UNIT_CHANNELS = UNIT_BYTES / ELEMENT_BYTES;
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ void unpack_unit(uint4 unit, float (&x)[UNIT_CHANNELS]) {
    const u32 word[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#ifdef VVAE_FP32
        x[i] = __uint_as_float(word[i]);
#else
        const float2 v = unpack2(word[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
#endif
    }
}

__device__ __forceinline__ uint4 pack_unit(const float (&x)[UNIT_CHANNELS]) {
#ifdef VVAE_FP32
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
#else
    return make_uint4(pack2(x[0], x[1]), pack2(x[2], x[3]), pack2(x[4], x[5]), pack2(x[6], x[7]));
#endif
}

/// Accurate to 2 ulp of f32. Volatile keeps the order in which the source issues them.
__device__ __forceinline__ float exp2_volatile(float x) {
    asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

__device__ __forceinline__ float reciprocal_volatile(float x) {
    asm volatile("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

/// Non-coherent load, once: only for memory that no thread of the launch writes.
__device__ __forceinline__ uint4 load_readonly_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

/// The same, for what other blocks of the multiprocessor load soon after.
__device__ __forceinline__ uint4 load_readonly(const void* address) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

/// Coherent load, once: the launch may write this memory later.
__device__ __forceinline__ uint4 load_once(const void* address) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

/// Non-coherent load. Volatile, so the compiler does not hoist it out of a loop and hold the registers throughout.
__device__ __forceinline__ float2 load_pair_readonly(const float* address) {
    float2 v;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
    return v;
}

__device__ __forceinline__ void store_pair(float* address, float x, float y) {
    *reinterpret_cast<float2*>(address) = make_float2(x, y);
}

/// x, y = x + y, x - y, in place: the difference is the sum less twice y. Volatile, so that no copies of accumulators
/// are live at the same time.
__device__ __forceinline__ void sum_and_difference(float& x, float& y) {
    asm volatile("add.rn.f32 %0, %0, %1;\nfma.rn.f32 %1, %1, 0fC0000000, %0;" : "+f"(x), "+f"(y));
}

__device__ __forceinline__ u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

/// Waits until `threads` threads have come to barrier `id`.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
