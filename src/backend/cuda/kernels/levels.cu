// Shortcuts around levels: means of 2 x 2 pixels, and values that are repeated where they are added. Bound by memory.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int HALF_UNIT_CHANNELS = UNIT_CHANNELS / 2, HALF_UNIT_BYTES = UNIT_BYTES / 2;

struct PoolParams {
    const u8* from[MAX_FRAMES];
    u8* into[MAX_FRAMES];
    i64 pixels;               // of the output
    int width;                // likewise
    int in_units, out_units;  // of a pixel
    int parts;                // 1, or 2: output channels are c * parts + part
    int part[MAX_FRAMES];
    int clear[MAX_FRAMES];  // whether the channels of all other parts become zero
};

/// Half a unit of channels as floats.
__device__ __forceinline__ void load_half_unit(const u8* at, float (&x)[HALF_UNIT_CHANNELS]) {
    const Pair* const pairs = reinterpret_cast<const Pair*>(at);
#pragma unroll
    for (int i = 0; i < HALF_UNIT_CHANNELS / 2; ++i) {
        const float2 v = unpack2(pairs[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
    }
}

/// The mean of 2 x 2 pixels, in the one order that every device has.
__device__ __forceinline__ float mean(float a, float b, float c, float d) {
    return 0.25f * __fadd_rn(__fadd_rn(__fadd_rn(a, b), c), d);
}

/// One part: a unit of each pixel becomes a unit.
__device__ __forceinline__ uint4 pool_unit(const u8* in, i64 next_column, i64 next_row) {
    float x[4][UNIT_CHANNELS], y[UNIT_CHANNELS];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_unit(load_once(in + i / 2 * next_row + i % 2 * next_column), x[i]);
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) y[i] = mean(x[0][i], x[1][i], x[2][i], x[3][i]);
    return pack_unit(y);
}

/// One of two parts: half a unit becomes every other channel of a unit, whose others are given.
__device__ __forceinline__ uint4 pool_part(const u8* in, i64 next_column, i64 next_row, int part, uint4 others) {
    float x[4][HALF_UNIT_CHANNELS], y[UNIT_CHANNELS];
#pragma unroll
    for (int i = 0; i < 4; ++i) load_half_unit(in + i / 2 * next_row + i % 2 * next_column, x[i]);
    unpack_unit(others, y);
#pragma unroll
    for (int i = 0; i < HALF_UNIT_CHANNELS; ++i) {
        const float value = mean(x[0][i], x[1][i], x[2][i], x[3][i]);
        y[2 * i] = part ? y[2 * i] : value;
        y[2 * i + 1] = part ? value : y[2 * i + 1];
    }
    return pack_unit(y);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool(const __grid_constant__ PoolParams p) {
    begin_launch();
    const int frame = blockIdx.y, part = p.part[frame];
    const bool clear = p.clear[frame];
    const u8* const from = p.from[frame];
    u8* const into = p.into[frame];
    const i64 next_column = static_cast<i64>(p.in_units) * UNIT_BYTES, next_row = 2 * p.width * next_column;
    const i64 units = p.pixels * p.out_units, step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 at = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; at < units; at += step) {
        const i64 pixel = at / p.out_units;
        const int unit = at % p.out_units;
        const i64 y = pixel / p.width, x = pixel % p.width;
        const u8* const corner = from + 2 * y * next_row + 2 * x * next_column;
        uint4* const out = reinterpret_cast<uint4*>(into + at * UNIT_BYTES);
        if (p.parts == 1) {
            *out = pool_unit(corner + unit * UNIT_BYTES, next_column, next_row);
        } else {
            const uint4 others = clear ? make_uint4(0, 0, 0, 0) : load_once(out);
            *out = pool_part(corner + unit * HALF_UNIT_BYTES, next_column, next_row, part, others);
        }
    }
}

struct AddParams {
    const u8* x[MAX_FRAMES];
    const u8* addend[MAX_FRAMES];
    u8* out[MAX_FRAMES];  // may be `x`
    i64 pixels;
    int width;
    int units, addend_units;   // of a pixel
    int channels;              // that exist
    int side, parts, repeats;  // see `source_channel`
    int part[MAX_FRAMES];
};

/// Which channel of the addend is added to channel `o`. `place`: of the pixel and the frame among those that share it.
__device__ __forceinline__ int source_channel(const AddParams& p, int o, int place) {
    return (o * p.parts * p.side * p.side + place) / p.repeats;
}

/// What is added to a unit of channels.
__device__ __forceinline__ void load_addend(const AddParams& p, const u8* addend, int unit, int place,
                                            float (&y)[UNIT_CHANNELS]) {
    const int factor = p.parts * p.side * p.side;
    if (p.repeats == factor) {
        // Channels are repeated for pixels and frames alone.
        unpack_unit(load_readonly(addend + unit * UNIT_BYTES), y);
        return;
    }
#pragma unroll
    for (int i = 0; i < UNIT_CHANNELS; ++i) {
        const int channel = unit * UNIT_CHANNELS + i;
        y[i] = 0.0f;
        if (channel < p.channels)
            y[i] = unpack1(__ldg(reinterpret_cast<const Element*>(addend) + source_channel(p, channel, place)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) add(const __grid_constant__ AddParams p) {
    begin_launch();
    const int frame = blockIdx.y;
    const u8 *const from = p.x[frame], *const addend = p.addend[frame];
    u8* const out = p.out[frame];
    const int addend_width = p.width / p.side;
    const i64 units = p.pixels * p.units, step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 at = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; at < units; at += step) {
        const i64 pixel = at / p.units;
        const int unit = at % p.units;
        const int row = pixel / p.width, col = pixel % p.width;
        const i64 source = static_cast<i64>(row / p.side) * addend_width + col / p.side;
        const int place = (p.part[frame] * p.side + row % p.side) * p.side + col % p.side;
        float x[UNIT_CHANNELS], y[UNIT_CHANNELS];
        unpack_unit(load_once(from + at * UNIT_BYTES), x);
        load_addend(p, addend + source * p.addend_units * UNIT_BYTES, unit, place, y);
#pragma unroll
        for (int i = 0; i < UNIT_CHANNELS; ++i) x[i] += y[i];
        *reinterpret_cast<uint4*>(out + at * UNIT_BYTES) = pack_unit(x);
    }
}
