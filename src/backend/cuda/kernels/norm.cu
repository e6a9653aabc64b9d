// GroupNorm over single frames: partial statistics to mean and deviation, and the norm itself as a pass of its own; and such a
// pass that changes nothing.
#include "norm.cuh"

constexpr int MAX_FRAMES = 32;

struct FinalizeParams {
    const float2* partials;  // [frame][record][quads]: mean and sum of squared differences of 4 channels
    float2* statistics;      // of slot 0, [groups]: mean, 1 / deviation
    i64 stride;              // from one frame's statistics to the next
    int quads;               // padded cout / 4
    int group_quads;         // quads of a group
    int groups;
    int phases, height, width;  // of the convolution's grid
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
    for (int i = 0; i < blockDim.x / 32; ++i) total += scratch[i];
    return total;
}

/// One block a group and frame. Two passes over records that lie in L2; the order of the sums depends on the frame's
/// shape alone.
extern "C" __global__ void __launch_bounds__(256) norm_finalize(const __grid_constant__ FinalizeParams p) {
    __shared__ float scratch[8];
    const int group = blockIdx.x, frame = blockIdx.y;
    const int rows = (p.height + 7) / 8, cols = (p.width + 15) / 16;
    const int records = p.phases * rows * cols;
    const float2* partials = p.partials + static_cast<i64>(frame) * records * p.quads + group * p.group_quads;
    const float total = 4.0f * p.group_quads * p.phases * p.height * p.width;
    const auto count = [&](int record) {
        const int col = record % cols, row = record / cols % rows;
        return 4.0f * min(8, p.height - 8 * row) * min(16, p.width - 16 * col);
    };
    float sum = 0.0f;
    for (int record = threadIdx.x; record < records; record += blockDim.x)
        for (int quad = 0; quad < p.group_quads; ++quad)
            sum += __ldg(partials + static_cast<i64>(record) * p.quads + quad).x * count(record);
    const float mean = block_sum(sum, scratch) / total;
    float squares = 0.0f;
    for (int record = threadIdx.x; record < records; record += blockDim.x)
        for (int quad = 0; quad < p.group_quads; ++quad) {
            const float2 part = __ldg(partials + static_cast<i64>(record) * p.quads + quad);
            squares += part.y + (part.x - mean) * (part.x - mean) * count(record);
        }
    const float variance = block_sum(squares, scratch) / total;
    if (threadIdx.x == 0)
        p.statistics[p.slot[frame] * p.stride + group] = make_float2(mean, 1.0f / sqrtf(variance + p.eps));
}

struct NormParams {
    Norm norm;
    const u8* in;
    u8* out;
    i64 in_slot_bytes, out_slot_bytes;
    i64 pixels;
    int channels;  // a multiple of 8
    int in_slot[MAX_FRAMES], out_slot[MAX_FRAMES];
};

/// A thread stays with a unit of channels and goes through pixels, four loads in flight.
template <bool SILU>
__device__ __forceinline__ void apply(const NormParams& p) {
    const int parts = p.channels / UNIT;
    const int frame = blockIdx.y;
    const int lanes = blockDim.x / parts;  // pixels a block takes at once
    if (threadIdx.x >= lanes * parts) return;
    const int part = threadIdx.x % parts;
    const u8* in = p.in + p.in_slot[frame] * p.in_slot_bytes + part * 16;
    u8* out = p.out + p.out_slot[frame] * p.out_slot_bytes + part * 16;
    UnitNorm norm;
    norm.load(p.norm, p.in_slot[frame], part * UNIT);
    const i64 row = static_cast<i64>(p.channels) * ELEMENT, step = row * gridDim.x * lanes, end = p.pixels * row;
    for (i64 at = row * (static_cast<i64>(blockIdx.x) * lanes + threadIdx.x / parts); at < end; at += 4 * step) {
        uint4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i * step < end) value[i] = load_streamed(in + at + i * step);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (at + i * step < end) *reinterpret_cast<uint4*>(out + at + i * step) = norm.apply<SILU>(value[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256) norm_apply(const __grid_constant__ NormParams p) { apply<false>(p); }

// What conv_wgmma leaves of a multiprocessor's registers is enough for a block of 128 threads with so many each. So what the next band
// of rows needs is made ready while one computes.
constexpr int BESIDE = 56;

extern "C" __global__ void __maxnreg__(BESIDE) norm_silu(const __grid_constant__ NormParams p) { apply<true>(p); }

/// Parts of frames, from where they lie to elsewhere, row by row.
struct CopyParams {
    const u8* from[MAX_FRAMES];
    u8* to[MAX_FRAMES];
    i64 from_pitch, to_pitch;  // bytes from one row to the next
    u32 row_units;             // of 16 bytes
    u32 units[MAX_FRAMES];     // of all rows
};

extern "C" __global__ void __maxnreg__(BESIDE) copy_rows(const __grid_constant__ CopyParams p) {
    const u8* from = p.from[blockIdx.y];
    u8* to = p.to[blockIdx.y];
    const u32 step = gridDim.x * blockDim.x, units = p.units[blockIdx.y];
    const auto place = [&](u32 unit, i64 pitch) { return unit / p.row_units * pitch + 16 * (unit % p.row_units); };
    for (u32 unit = blockIdx.x * blockDim.x + threadIdx.x; unit < units; unit += 4 * step) {
        uint4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (unit + i * step < units) value[i] = load_streamed(from + place(unit + i * step, p.from_pitch));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (unit + i * step < units) *reinterpret_cast<uint4*>(to + place(unit + i * step, p.to_pitch)) = value[i];
    }
}

struct StatisticsParams {
    const u8* in;
    float2* statistics;  // of slot 0, [groups]
    i64 stride, slot_bytes, pixels;
    int channels, group_channels, groups;
    float eps;
    int slot[MAX_FRAMES];
};

/// Statistics straight from a frame, for layers whose groups are no multiple of 4 channels (small test models).
extern "C" __global__ void __launch_bounds__(256) norm_statistics(const __grid_constant__ StatisticsParams p) {
    __shared__ float scratch[8];
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
