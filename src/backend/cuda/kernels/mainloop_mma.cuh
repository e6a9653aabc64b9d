// Mainloop of the convolutions by mma.sync: patches in shared memory by cp.async, weights from L2 to registers.
//
// A warp computes its rows of a tile for 32 output channels that no other warp of these rows computes. So nobody shares
// its weights: they bypass shared memory, and warps wait for each other once a patch instead of once a tap. A row
// of the patch, once in registers, can serve all taps of a column.
//
// Weights are packed in steps of 64 bytes of input channels, [product][16 output channels][lane][16 bytes]: a lane's
// operands of one product in two blocks of 8 output channels.
#pragma once
#include "ampere.cuh"
#include "tile_scheduler.cuh"

constexpr int TILE_ROWS = 8;
constexpr int TILE_COLS = 16;
constexpr int WARP_CHANNELS = 32;
constexpr int CHANNEL_BLOCKS = WARP_CHANNELS / 8;  // a product has 8 columns

constexpr int STEP_BYTES = 64;  // of an output channel
constexpr int STEP_CHANNELS = STEP_BYTES / ELEMENT_BYTES;

/// Steps of a tile of weights, and how warps share its columns.
template <class Widths>
struct Steps {
    static constexpr int COUNT = Widths::ROW / STEP_BYTES;  // of a K block
    static constexpr int TILE_BYTES = Widths::COLUMNS * STEP_BYTES, PRODUCT_BYTES = TILE_BYTES / 2;
    static constexpr int CHANNEL_WARPS = Widths::COLUMNS / WARP_CHANNELS;
};

constexpr int PATCH_PITCH = 18;  // pixels of a row, whatever the window
constexpr int PATCH_PIXELS = 10 * PATCH_PITCH;

/// A lane's weights of one product, for a column of taps.
template <int TAP_ROWS>
struct ColumnWeights {
    uint4 unit[TAP_ROWS][CHANNEL_BLOCKS / 2];

    /// `row_bytes`: between adjacent taps of the column.
    __device__ __forceinline__ void load(const u8* from, int row_bytes) {
#pragma unroll
        for (int i = 0; i < TAP_ROWS; ++i)
#pragma unroll
            for (int n = 0; n < CHANNEL_BLOCKS / 2; ++n)
                unit[i][n] = load_readonly(from + i * row_bytes + n * (32 * UNIT_BYTES));
    }
};

/// A lane's weights of a tap and step.
template <class Widths>
struct StepWeights {
    ColumnWeights<1> product[2];

    __device__ __forceinline__ void load(const u8* from) {
        product[0].load(from, 0);
        product[1].load(from + Steps<Widths>::PRODUCT_BYTES, 0);
    }
};

/// Where a lane's weights begin in a step's tile.
__device__ __forceinline__ int lane_weights(int warp_channel, int lane) {
    return warp_channel / 16 * (32 * UNIT_BYTES) + lane * UNIT_BYTES;
}

/// Adds one product of each tap of a column. `first`: what a lane gives to ldmatrix in the first row of the warp.
/// `PIXEL_BYTES`: of a pixel in the patch.
template <int PIXEL_BYTES, int TAP_ROWS, int ROWS>
__device__ __forceinline__ void add_column(u32 first, const ColumnWeights<TAP_ROWS>& weights,
                                           float (&acc)[ROWS][CHANNEL_BLOCKS][4]) {
    constexpr int PATCH_ROWS = ROWS + TAP_ROWS - 1;
    u32 a[2][4];  // [parity of the row]
    ldmatrix_x4(a[0], first);
#pragma unroll
    for (int row = 0; row < PATCH_ROWS; ++row) {
        if (row + 1 < PATCH_ROWS) ldmatrix_x4(a[(row + 1) % 2], first + (row + 1) * PATCH_PITCH * PIXEL_BYTES);
#pragma unroll
        for (int i = 0; i < TAP_ROWS; ++i) {
            const int m = row - i;
            if (m < 0 || m >= ROWS) continue;
#pragma unroll
            for (int n = 0; n < CHANNEL_BLOCKS; n += 2) {
                const uint4& w = weights.unit[i][n / 2];
                mma_long_sum(acc[m][n], a[row % 2], w.x, w.y);
                mma_long_sum(acc[m][n + 1], a[row % 2], w.z, w.w);
            }
        }
    }
}

/// Where a thread's units of a patch are in device memory, in the first channels. They may be outside the frame.
struct alignas(16) UnitSource {
    const u8* first;
    int row_bytes;  // between adjacent rows of the patch
    u32 valid;      // bit i: unit i is in the frame, and a tap reads it

    __device__ __forceinline__ void store(u32 shared) const {
        const u64 address = reinterpret_cast<u64>(first);
        store_shared_unit(shared, make_uint4(address, address >> 32, row_bytes, valid));
    }

    static __device__ __forceinline__ UnitSource load(u32 shared) {
        const uint4 v = load_shared_unit(shared);
        return {reinterpret_cast<const u8*>(v.x | static_cast<u64>(v.y) << 32), static_cast<int>(v.z), v.w};
    }
};

/// Which units of a patch a thread loads: one column of the tile, in every `ROWS`th row; then some of the halo's
/// columns. So places and addresses advance by constants. `UNITS`: of a pixel, for adjacent threads.
template <int LOADERS, int UNITS>
struct UnitWalk {
    static constexpr int PIXELS = LOADERS / UNITS, ROWS = PIXELS / TILE_COLS, PIXEL_BYTES = UNITS * UNIT_BYTES;
    static constexpr int PATCH_ROWS = TILE_ROWS + 2, TILE_UNITS = PATCH_ROWS / ROWS;
    static constexpr int HALO_PIXELS = 2 * PATCH_ROWS, HALO_ROWS = PIXELS / 2;
    static constexpr int HALO_UNITS = (HALO_PIXELS + PIXELS - 1) / PIXELS, COUNT = TILE_UNITS + HALO_UNITS;
    static_assert(PIXELS % TILE_COLS == 0 && PATCH_ROWS % ROWS == 0 && PIXELS % 2 == 0);
    u32 pixel, unit;

    __device__ __forceinline__ explicit UnitWalk(u32 thread) : pixel(thread / UNITS), unit(thread % UNITS) {}

    __device__ __forceinline__ int row() const { return pixel / TILE_COLS; }
    __device__ __forceinline__ int col() const { return pixel % TILE_COLS; }
    __device__ __forceinline__ int halo_row() const { return pixel / 2; }
    __device__ __forceinline__ int halo_col() const { return TILE_COLS + pixel % 2; }

    /// Units are swizzled by the column, so that ldmatrix has no conflicts of banks.
    __device__ __forceinline__ int place(int row, int col) const {
        constexpr int SHIFT = UNITS == 8 ? 0 : 1;
        return (row * PATCH_PITCH + col) * PIXEL_BYTES + ((unit ^ (col >> SHIFT & (UNITS - 1))) << 4);
    }

    /// The place of unit `i`, and whether there is one.
    __device__ __forceinline__ int place(int i) const {
        constexpr int ROW = PATCH_PITCH * PIXEL_BYTES;
        if (i < TILE_UNITS) return place(row(), col()) + i * ROWS * ROW;
        return place(halo_row(), halo_col()) + (i - TILE_UNITS) * HALO_ROWS * ROW;
    }
    __device__ __forceinline__ bool has(int i) const {
        return i < TILE_UNITS || pixel + (i - TILE_UNITS) * PIXELS < HALO_PIXELS;
    }

    __device__ __forceinline__ UnitSource locate(const Source& source, const Plane& plane, const FramePart& part,
                                                 int slot, const Tile& tile) const {
        const int stride = source.stride, pixel_bytes = source.channels * ELEMENT_BYTES;
        const int left = tile.x * stride + plane.dx - part.first_column, top = tile.y * stride + plane.dy;
        const i64 pixel = static_cast<i64>(top + row() * stride) * part.width + left + col() * stride;
        UnitSource from = {part.frames + slot * part.slot_bytes + pixel * pixel_bytes + unit * UNIT_BYTES,
                           part.width * pixel_bytes * stride, 0};
        const auto reads_column = [&](int col) {
            return col < source.pitch && static_cast<u32>(left + col * stride) < static_cast<u32>(part.width);
        };
        const auto reads_row = [&](int row) {
            return row < source.rows && static_cast<u32>(top + row * stride) < static_cast<u32>(source.height);
        };
        const bool column = reads_column(col()), halo_column = reads_column(halo_col());
#pragma unroll
        for (int i = 0; i < TILE_UNITS; ++i) from.valid |= (column & reads_row(row() + i * ROWS)) << i;
#pragma unroll
        for (int i = 0; i < HALO_UNITS; ++i)
            from.valid |= (halo_column & reads_row(halo_row() + i * HALO_ROWS)) << (TILE_UNITS + i);
        return from;
    }

    /// Loads these units, from `first_channel` on; zeros where they are not valid. No byte is read there.
    __device__ __forceinline__ void load(const Source& source, UnitSource from, int first_channel, u32 to) const {
        const u32 valid = first_channel + unit * UNIT_CHANNELS < source.channels ? from.valid : 0;
        const i64 row_bytes = from.row_bytes;
        const u8* at = from.first + first_channel * ELEMENT_BYTES;
        // Less than 2^31 bytes apart.
        const u8* halo = at + ((halo_row() - row()) * from.row_bytes +
                               (halo_col() - col()) * (source.channels * ELEMENT_BYTES * source.stride));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const u8*& unit = i < TILE_UNITS ? at : halo;
            if (has(i)) cp_async_16(to + place(i), unit, valid >> i & 1);
            unit += (i < TILE_UNITS ? ROWS : HALO_ROWS) * row_bytes;
        }
    }
};
