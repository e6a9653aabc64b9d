// Host tensors to activations and back, and the blending of tiles. One thread per pixel; these move little data next to
// the convolutions.
#include "common.cuh"

constexpr int THREADS = 256;
// The most channels that have maps of their own. Parameters have no room for many more.
constexpr int MAX_MAPS = 128;

// Codes of `Strided::dtype`; any other is f32.
constexpr u32 U8 = 0x00010801;
constexpr u32 U16 = 0x00011001;
constexpr u32 F16 = 0x00011002;
constexpr u32 BF16 = 0x00011004;

/// A frame of a host tensor, or its staging buffer.
struct Strided {
    u8* data;
    i64 by_channel, by_row, by_column;  // in elements
    u32 dtype;
    int channels, height, width;

    __device__ __forceinline__ i64 at(int c, int y, int x) const { return c * by_channel + y * by_row + x * by_column; }
};

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ u16 float_to_half(float value) {
    u16 bits;
    asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u16 float_to_bfloat(float value) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
    return static_cast<u16>(pair);
}

__device__ __forceinline__ float read(const Strided& tensor, i64 at) {
    switch (tensor.dtype) {
        case U8: return tensor.data[at];
        case U16: return reinterpret_cast<const u16*>(tensor.data)[at];
        case F16: return half_to_float(reinterpret_cast<const u16*>(tensor.data)[at]);
        case BF16: return __uint_as_float(static_cast<u32>(reinterpret_cast<const u16*>(tensor.data)[at]) << 16);
        default: return reinterpret_cast<const float*>(tensor.data)[at];
    }
}

/// Integers are rounded to nearest even and clamped; NaN becomes 0.
__device__ __forceinline__ void write(const Strided& tensor, i64 at, float value) {
    switch (tensor.dtype) {
        case U8: tensor.data[at] = static_cast<u8>(fminf(fmaxf(rintf(value), 0.0f), 255.0f)); return;
        case U16:
            reinterpret_cast<u16*>(tensor.data)[at] = static_cast<u16>(fminf(fmaxf(rintf(value), 0.0f), 65535.0f));
            return;
        case F16: reinterpret_cast<u16*>(tensor.data)[at] = float_to_half(value); return;
        case BF16: reinterpret_cast<u16*>(tensor.data)[at] = float_to_bfloat(value); return;
        default: reinterpret_cast<float*>(tensor.data)[at] = value;
    }
}

/// Whether a value is neither NaN nor infinite.
__device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

struct LoadParams {
    Strided from;
    Element* into;
    u32* nonfinite;     // set to 1 if a value is not finite; in host memory, so never read
    int height, width;  // activations
    int channels;       // activations; those that the tensor lacks are 1
    int stride;         // channels of a pixel in memory; those beyond the activations' are zero
    int patch;          // rows and columns of the tensor that are one pixel; channels are [channel][column][row]
    float mul, add;
};

extern "C" __global__ void __launch_bounds__(THREADS) load(const __grid_constant__ LoadParams p) {
    begin_launch();
    const i64 pixel = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pixel >= static_cast<i64>(p.height) * p.width) return;
    const int top = static_cast<int>(pixel / p.width) * p.patch, left = static_cast<int>(pixel % p.width) * p.patch;
    Element* into = p.into + pixel * p.stride;
    bool finite = true;
    int c = 0, column = 0, row = 0;  // of the tensor
    for (int i = 0; i < p.stride; ++i) {
        const int y = min(top + row, p.from.height - 1), x = min(left + column, p.from.width - 1);
        const float missing = i < p.channels ? 1.0f : 0.0f;
        const float value = c < p.from.channels ? fmaf(read(p.from, p.from.at(c, y, x)), p.mul, p.add) : missing;
        finite &= is_finite(value);
        into[i] = pack1(value);
        if (++row < p.patch) continue;
        row = 0;
        if (++column < p.patch) continue;
        column = 0, ++c;
    }
    if (!finite) *p.nonfinite = 1;
}

/// A map of its own for each channel of a tensor. `side` x `side` pixels of activations are one of the tensor, whose
/// channels are [channel][row][column].
struct ChannelMaps {
    int side;
    float mul[MAX_MAPS], add[MAX_MAPS];

    __device__ __forceinline__ float apply(int channel, float value) const {
        return fmaf(value, mul[channel], add[channel]);
    }
};

/// `mul`, `add` and `patch` of `load` have no effect.
struct MappedLoadParams {
    LoadParams load;
    ChannelMaps maps;
    int top, left;  // of the activations within the tensor's first pixel
};

extern "C" __global__ void __launch_bounds__(THREADS) load_mapped(const __grid_constant__ MappedLoadParams params) {
    begin_launch();
    const LoadParams& p = params.load;
    const i64 pixel = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pixel >= static_cast<i64>(p.height) * p.width) return;
    const int side = params.maps.side;
    const int y = min(params.top + static_cast<int>(pixel / p.width), p.from.height * side - 1);
    const int x = min(params.left + static_cast<int>(pixel % p.width), p.from.width * side - 1);
    const int row = y / side, column = x / side, first = y % side * side + x % side;
    Element* into = p.into + pixel * p.stride;
    bool finite = true;
    for (int i = 0; i < p.stride; ++i) {
        const int c = i * side * side + first;
        const float value = i < p.channels ? params.maps.apply(c, read(p.from, p.from.at(c, row, column))) : 0.0f;
        finite &= is_finite(value);
        into[i] = pack1(value);
    }
    if (!finite) *p.nonfinite = 1;
}

struct StoreParams {
    Strided into;
    const Element* from;
    const float *rows, *columns;  // sums of the blend weights of all tiles, or null
    u32* nonfinite;               // as in LoadParams
    int width;                    // activations
    int stride, channel;
    int patch;   // as in LoadParams
    int logvar;  // channel of the log-variance of channel 0, or -1 to store without sampling
    float clamp_low, clamp_high;
    float mul, add;
    u64 seed;
    u32 batch, frame;
};

/// Philox 4x32-10 and Box-Muller in f64. The CPU backend computes the same numbers.
__device__ __forceinline__ float normal(u64 seed, u32 x, u32 y, u32 frame, u32 last) {
    u32 c[4] = {x, y, frame, last}, key[2] = {static_cast<u32>(seed), static_cast<u32>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const u64 a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        const u32 next[4] = {static_cast<u32>(b >> 32) ^ c[1] ^ key[0], static_cast<u32>(b),
                             static_cast<u32>(a >> 32) ^ c[3] ^ key[1], static_cast<u32>(a)};
        for (int i = 0; i < 4; ++i) c[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    const double word = 4294967296.0;
    const double radius = sqrt(-2.0 * log((c[0] + 1.0) / word));
    return static_cast<float>(radius * cos(6.283185307179586 * (c[1] / word)));
}

/// Where the noise of a value is.
struct NoisePlace {
    int channel, row, column;
};

/// A value of activations as it is stored, before its map. `channel` counts from the first that is stored.
__device__ __forceinline__ float stored_value(
    const StoreParams& p, const Element* from, float scale, int channel, NoisePlace noise) {
    float value = unpack1(from[p.channel + channel]) * scale;
    // Comparisons, not fminf and fmaxf: NaN stays NaN.
    if (value < p.clamp_low) value = p.clamp_low;
    if (value > p.clamp_high) value = p.clamp_high;
    if (p.logvar >= 0) {
        const float logvar = fminf(fmaxf(unpack1(from[p.logvar + noise.channel]) * scale, -30.0f), 20.0f);
        const u32 last = noise.channel + (p.batch << 16);
        value += expf(0.5f * logvar) * normal(p.seed, noise.column, noise.row, p.frame, last);
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) store(const __grid_constant__ StoreParams p) {
    begin_launch();
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= static_cast<i64>(p.into.height) * p.into.width) return;
    const int y = index / p.into.width, x = index % p.into.width;
    const int row = y / p.patch, column = x / p.patch;  // of activations
    const Element* from = p.from + (static_cast<i64>(row) * p.width + column) * p.stride;
    const float scale = p.rows ? 1.0f / fmaxf(p.rows[row] * p.columns[column], 1e-6f) : 1.0f;
    bool finite = true;
    for (int c = 0; c < p.into.channels; ++c) {
        const int channel = (c * p.patch + x % p.patch) * p.patch + y % p.patch;
        const float value = stored_value(p, from, scale, channel, {c, y, x});
        finite &= is_finite(value);
        write(p.into, p.into.at(c, y, x), fmaf(value, p.mul, p.add));
    }
    if (!finite) *p.nonfinite = 1;
}

/// `mul`, `add` and `patch` of `store` have no effect.
struct MappedStoreParams {
    StoreParams store;
    ChannelMaps maps;
};

extern "C" __global__ void __launch_bounds__(THREADS) store_mapped(const __grid_constant__ MappedStoreParams params) {
    begin_launch();
    const StoreParams& p = params.store;
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= static_cast<i64>(p.into.height) * p.into.width) return;
    const int side = params.maps.side, y = index / p.into.width, x = index % p.into.width;
    bool finite = true;
    for (int c = 0; c < p.into.channels; ++c) {
        // Of activations.
        const int channel = c / (side * side), row = y * side + c / side % side, column = x * side + c % side;
        const Element* from = p.from + (static_cast<i64>(row) * p.width + column) * p.stride;
        const float scale = p.rows ? 1.0f / fmaxf(p.rows[row] * p.columns[column], 1e-6f) : 1.0f;
        const float value = stored_value(p, from, scale, channel, {channel, row, column});
        finite &= is_finite(value);
        write(p.into, p.into.at(c, y, x), params.maps.apply(c, value));
    }
    if (!finite) *p.nonfinite = 1;
}

struct BlendParams {
    const Element* from;
    Element* into;
    const float *rows, *columns;  // blend weights of the tile
    int height, width;            // tile
    int into_width;
    int top, left;
    int stride;
    int clear;  // for the first tile of a frame: the frame's height; else 0
};

extern "C" __global__ void __launch_bounds__(THREADS) blend(const __grid_constant__ BlendParams p) {
    begin_launch();
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int area_width = p.clear ? p.into_width : p.width, area_height = p.clear ? p.clear : p.height;
    if (index >= static_cast<i64>(area_height) * area_width) return;
    // With `clear`, every pixel of the frame is written; else the tile's.
    const int y = index / area_width + (p.clear ? 0 : p.top), x = index % area_width + (p.clear ? 0 : p.left);
    const int row = y - p.top, column = x - p.left;
    const bool covered = row >= 0 && row < p.height && column >= 0 && column < p.width;
    const float weight = covered ? p.rows[row] * p.columns[column] : 0.0f;
    Element* into = p.into + (static_cast<i64>(y) * p.into_width + x) * p.stride;
    const Element* from = p.from + (covered ? (static_cast<i64>(row) * p.width + column) * p.stride : 0);
    for (int c = 0; c < p.stride; ++c) {
        const float sum = p.clear ? 0.0f : unpack1(into[c]);
        into[c] = pack1(covered ? fmaf(unpack1(from[c]), weight, sum) : sum);
    }
}
