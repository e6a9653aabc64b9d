// Norms as a separate pass: GroupNorm over single frames, with records to mean and deviation, and the norm of pixels.
// Also a copy of rows.
#include "norm.cuh"

constexpr int THREADS = 256;  // norm_finalize, norm_statistics; at most as many in norm_apply, norm_silu

struct FinalizeParams {
    const float2* records;      // [frame][record][quads]: mean and M2 of 4 channels
    float2* statistics;         // slot 0, [groups]: mean, 1 / deviation
    i64 stride;                 // between the statistics of adjacent slots, in float2
    int quads;                  // padded cout / 4
    int group_quads;            // quads of a group
    int groups;                 // not read: the grid has a block for each
    int phases, height, width;  // of the convolution's tile grid. Even and odd columns are phases, too
    int missing_columns;        // of the last phase
    float eps;
    int slot[MAX_FRAMES];
};

__device__ __forceinline__ float block_sum(float value, float* scratch) {
#pragma unroll
    for (int i = 16; i >= 1; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < THREADS / 32; ++i) total += scratch[i];
    return total;
}

/// One block per group and frame. The frame's shape fixes the order of summation. A thread reads its records once and
/// takes moments about the first of their means, so little cancels.
extern "C" __global__ void __launch_bounds__(THREADS) norm_finalize(const __grid_constant__ FinalizeParams p) {
    __shared__ float scratch[THREADS / 32];
    const int group = blockIdx.x, frame = blockIdx.y;
    const int rows = (p.height + RECORD_ROWS - 1) / RECORD_ROWS, cols = (p.width + RECORD_COLS - 1) / RECORD_COLS;
    const int count = p.phases * rows * cols;
    const float2* records = p.records + static_cast<i64>(frame) * count * p.quads + group * p.group_quads;
    const float total = 4.0f * p.group_quads * p.height * (p.phases * p.width - p.missing_columns);
    const int next_col = THREADS % cols, next_row = THREADS / cols % rows;  // from a record of this thread to its next
    const float pivot = threadIdx.x < count ? __ldg(records + static_cast<i64>(threadIdx.x) * p.quads).x : 0.0f;
    float elements = 0.0f, sum = 0.0f, squares = 0.0f;
    // All records of this thread for a quad, then those for the next. Loads go ahead across quads.
    const int first = threadIdx.x, first_col = first % cols, first_row = first / cols % rows;
    const int own = first < count ? (count - first + THREADS - 1) / THREADS : 0;
    int next_record = first, next_quad = 0;
    int record = first, col = first_col, row = first_row;
    constexpr int LOADS = 16;  // in flight
    for (int left = own * p.group_quads; left > 0; left -= LOADS) {
        float2 part[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (i >= left) break;
            part[i] = __ldg(records + static_cast<i64>(next_record) * p.quads + next_quad);
            next_record += THREADS;
            if (next_record >= count) next_record = first, ++next_quad;
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (i >= left) break;
            const int width = p.width - (record < count - rows * cols ? 0 : p.missing_columns);
            const float part_elements =
                4 * min(RECORD_ROWS, p.height - RECORD_ROWS * row) * min(RECORD_COLS, width - RECORD_COLS * col);
            const float difference = part[i].x - pivot, weighted = difference * part_elements;
            elements += part_elements;
            sum += weighted;
            squares += fmaf(weighted, difference, part[i].y);
            record += THREADS, col += next_col, row += next_row;
            if (col >= cols) col -= cols, ++row;
            if (row >= rows) row -= rows;
            if (record >= count) record = first, col = first_col, row = first_row;
        }
    }
    const float mean = block_sum(fmaf(pivot, elements, sum), scratch) / total;
    const float offset = elements > 0.0f ? sum / elements : 0.0f, distance = pivot + offset - mean;
    const float variance =
        block_sum(fmaxf(squares - sum * offset, 0.0f) + elements * distance * distance, scratch) / total;
    if (threadIdx.x == 0)
        p.statistics[p.slot[frame] * p.stride + group] = make_float2(mean, 1.0f / sqrtf(variance + p.eps));
}

struct NormParams {
    Norm norm;
    const u8* in;
    u8* out;  // may be `in`
    i64 in_slot_bytes, out_slot_bytes;
    i64 pixels;
    int channels;  // a multiple of 8
    int in_slot[MAX_FRAMES], out_slot[MAX_FRAMES];
};

/// The frame of a block, and its pixels: from `first` down to `stop`. Frames are read backwards: L2 still has what the
/// convolution before has written last, and the convolution behind begins with what is written last here. The blocks
/// of a single frame come in two rounds, so each round has half of the frame.
struct Backwards {
    int frame;
    i64 first, stop, step;

    __device__ __forceinline__ Backwards(i64 pixels, int block_pixels) {
        frame = gridDim.y - 1 - blockIdx.y;
        const bool halves = gridDim.y == 1 && gridDim.x > 1;
        const u32 lower = halves ? (gridDim.x + 1) / 2 : gridDim.x, upper = gridDim.x - lower;
        const bool is_upper = blockIdx.x >= lower;
        const i64 middle = halves ? pixels / 2 : 0;
        first = (is_upper ? middle : pixels) - 1 - static_cast<i64>(blockIdx.x - is_upper * lower) * block_pixels;
        stop = is_upper ? 0 : middle;
        step = static_cast<i64>(is_upper ? upper : lower) * block_pixels;
    }
};

/// Each thread normalises one unit of channels of many pixels, four loads in flight.
template <bool SILU>
__device__ __forceinline__ void apply(const NormParams& p) {
    const int units = p.channels / UNIT_CHANNELS;
    const int block_pixels = blockDim.x / units;
    const Backwards pixels(p.pixels, block_pixels);
    const int frame = pixels.frame;
    if (threadIdx.x >= block_pixels * units) return;
    const int unit = threadIdx.x % units;
    const i64 pixel_bytes = static_cast<i64>(p.channels) * ELEMENT_BYTES;
    const u8* in = p.in + p.in_slot[frame] * p.in_slot_bytes + unit * UNIT_BYTES;
    u8* out = p.out + p.out_slot[frame] * p.out_slot_bytes + unit * UNIT_BYTES;
    UnitNorm norm;
    norm.load(p.norm, p.in_slot[frame], unit * UNIT_CHANNELS);
    const i64 step = pixels.step * pixel_bytes, stop = pixels.stop * pixel_bytes;
    for (i64 at = (pixels.first - threadIdx.x / units) * pixel_bytes; at >= stop; at -= 4 * step) {
        uint4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at - i * step >= stop) value[i] = load_once(in + at - i * step);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at - i * step >= stop) *reinterpret_cast<uint4*>(out + at - i * step) = norm.apply<SILU>(value[i]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_apply(const __grid_constant__ NormParams p) {
    apply<false>(p);
}

extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) norm_silu(const __grid_constant__ NormParams p) {
    apply<true>(p);
}

/// The norm of pixels. A thread holds up to four units of a pixel. Where it has more, it loads them again.
template <bool SILU>
__device__ __forceinline__ void apply_by_pixel(const NormParams& p) {
    constexpr int HELD = 4;
    const int units = p.channels / UNIT_CHANNELS, lanes = pixel_lanes(p.channels);
    const int lane = threadIdx.x % lanes, block_pixels = blockDim.x / lanes;
    const Backwards pixels(p.pixels, block_pixels);
    const int frame = pixels.frame;
    const int parts = (units + lanes * HELD - 1) / (lanes * HELD);
    const i64 pixel_bytes = static_cast<i64>(p.channels) * ELEMENT_BYTES;
    const u8* const in = p.in + p.in_slot[frame] * p.in_slot_bytes;
    u8* const out = p.out + p.out_slot[frame] * p.out_slot_bytes;
    const float* const gamma = p.norm.gamma;
    const int within_warp = threadIdx.x % 32 / lanes;
    // The lanes of a warp stay together: they exchange sums.
    for (i64 warp_pixel = pixels.first - threadIdx.x / lanes + within_warp; warp_pixel >= pixels.stop;
         warp_pixel -= pixels.step) {
        const i64 at = (warp_pixel - within_warp) * pixel_bytes;
        const bool inside = warp_pixel - within_warp >= pixels.stop;
        uint4 value[HELD];
        const auto unit_of = [&](int part, int i) { return (part * HELD + i) * lanes + lane; };
        const auto has = [&](int unit) { return inside && unit < units; };
        const auto load = [&](int part) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int unit = unit_of(part, i);
                value[i] = has(unit) ? load_once(in + at + unit * UNIT_BYTES) : make_uint4(0, 0, 0, 0);
            }
        };
        float sum = 0.0f;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            load(part);
#pragma unroll
            for (int i = 0; i < HELD; ++i) sum = add_squares(value[i], sum);
        }
        const float inverse = inverse_length(sum, lanes);
        // From the last part on, which is there.
#pragma unroll 1
        for (int part = parts - 1; part >= 0; --part) {
            if (part < parts - 1) load(part);
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int unit = unit_of(part, i);
                if (!has(unit)) continue;
                float factor[UNIT_CHANNELS];
#pragma unroll
                for (int c = 0; c < UNIT_CHANNELS; c += 2) {
                    const float2 pair = load_pair_readonly(gamma + unit * UNIT_CHANNELS + c);
                    factor[c] = pair.x, factor[c + 1] = pair.y;
                }
                *reinterpret_cast<uint4*>(out + at + unit * UNIT_BYTES) =
                    normalise_unit<SILU>(value[i], inverse, factor);
            }
        }
    }
}

extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) norm_pixel(const __grid_constant__ NormParams p) {
    apply_by_pixel<false>(p);
}

extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) norm_pixel_silu(const __grid_constant__ NormParams p) {
    apply_by_pixel<true>(p);
}

/// Rows of frames, copied to another place on the device. Sources and destinations must not overlap.
struct CopyParams {
    const u8* from[MAX_FRAMES];
    u8* to[MAX_FRAMES];
    i64 from_pitch, to_pitch;  // bytes between adjacent rows
    u32 row_units;
    u32 units[MAX_FRAMES];  // of all rows
};

extern "C" __global__ void __maxnreg__(CORESIDENT_REGISTERS) copy_rows(const __grid_constant__ CopyParams p) {
    const u8* from = p.from[blockIdx.y];
    u8* to = p.to[blockIdx.y];
    const u32 step = gridDim.x * blockDim.x, units = p.units[blockIdx.y];
    const auto offset = [&](u32 unit, i64 pitch) {
        return unit / p.row_units * pitch + UNIT_BYTES * (unit % p.row_units);
    };
    for (u32 unit = blockIdx.x * blockDim.x + threadIdx.x; unit < units; unit += 4 * step) {
        uint4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (unit + i * step < units) value[i] = load_readonly_once(from + offset(unit + i * step, p.from_pitch));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (unit + i * step < units) *reinterpret_cast<uint4*>(to + offset(unit + i * step, p.to_pitch)) = value[i];
    }
}

struct StatisticsParams {
    const u8* in;
    float2* statistics;  // slot 0, [groups]
    i64 stride, slot_bytes, pixels;
    int channels, group_channels, groups;
    float eps;
    int slot[MAX_FRAMES];
};

/// Statistics straight from a frame, for groups that are no multiple of 4 channels (small test models).
extern "C" __global__ void __launch_bounds__(THREADS) norm_statistics(const __grid_constant__ StatisticsParams p) {
    __shared__ float scratch[THREADS / 32];
    const int group = blockIdx.x, slot = p.slot[blockIdx.y], width = p.group_channels;
    const Element* in = reinterpret_cast<const Element*>(p.in + slot * p.slot_bytes) + group * width;
    const float total = static_cast<float>(p.pixels) * width;
    float mean = 0.0f, variance = 0.0f;
    for (int pass = 0; pass < 2; ++pass) {
        float sum = 0.0f;
        for (i64 i = threadIdx.x; i < p.pixels * width; i += blockDim.x) {
            const float value = unpack1(in[i / width * p.channels + i % width]);
            sum += pass ? (value - mean) * (value - mean) : value;
        }
        (pass ? variance : mean) = block_sum(sum, scratch) / total;
    }
    if (threadIdx.x == 0) p.statistics[slot * p.stride + group] = make_float2(mean, 1.0f / sqrtf(variance + p.eps));
}
