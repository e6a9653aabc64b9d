// Mainloop of the convolutions by mma.sync: patches in shared memory by cp.async, weights from L2 to registers.
//
// A warp computes its rows of a tile for 32 output channels that no other warp of these rows computes. So nobody shares
// its weights: they bypass shared memory, and warps wait for each other once a patch instead of once a tap.
//
// Weights are packed in steps of 64 bytes of input channels: [128 output channels][64 bytes]. In a row, word u of unit
// t is word t of the channels' unit u, so that one load is a lane's operand of both products of a step.
#pragma once
#include "ampere.cuh"
#include "tile_scheduler.cuh"

constexpr int TILE_ROWS = 8;
constexpr int TILE_COLS = 16;
constexpr int WARP_CHANNELS = 32;
constexpr int CHANNEL_BLOCKS = WARP_CHANNELS / 8;  // a product has 8 columns
constexpr int CHANNEL_WARPS = TILE_CHANNELS / WARP_CHANNELS;

constexpr int STEP_BYTES = 64;  // of an output channel
constexpr int STEP_TILE_BYTES = TILE_CHANNELS * STEP_BYTES;
constexpr int STEPS = WEIGHT_TILE_BYTES / STEP_TILE_BYTES;
constexpr int STEP_CHANNELS = STEP_BYTES / ELEMENT_BYTES;

constexpr int PATCH_PITCH = 18;  // pixels of a row, whatever the window
constexpr int PATCH_PIXELS = 10 * PATCH_PITCH;

/// A lane's weights of a step.
struct StepWeights {
    uint4 block[CHANNEL_BLOCKS];

    __device__ __forceinline__ void load(const u8* from) {
#pragma unroll
        for (int n = 0; n < CHANNEL_BLOCKS; ++n) block[n] = load_readonly(from + n * 8 * STEP_BYTES);
    }
};

/// Where a lane's weights begin in a step's tile.
__device__ __forceinline__ int lane_weights(int warp_channel, int lane) {
    return warp_channel * STEP_BYTES + lane * UNIT_BYTES;
}

/// Adds the products of a tap and step. `first` and `second`: what a lane gives to ldmatrix for its two products, in
/// the first row of the warp. `PIXEL_BYTES`: of a pixel in the patch.
template <int PIXEL_BYTES, int ROWS>
__device__ __forceinline__ void add_step(u32 first, u32 second, const StepWeights& weights,
                                         float (&acc)[ROWS][CHANNEL_BLOCKS][4]) {
    constexpr int ROW = PATCH_PITCH * PIXEL_BYTES;
    u32 a[2][2][4];  // [parity of the row][product]
    ldmatrix_x4(a[0][0], first);
    ldmatrix_x4(a[0][1], second);
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
        if (m + 1 < ROWS) {
            ldmatrix_x4(a[(m + 1) % 2][0], first + (m + 1) * ROW);
            ldmatrix_x4(a[(m + 1) % 2][1], second + (m + 1) * ROW);
        }
#pragma unroll
        for (int n = 0; n < CHANNEL_BLOCKS; ++n)
            mma_long_sum(acc[m][n], a[m % 2][0], weights.block[n].x, weights.block[n].y);
#pragma unroll
        for (int n = 0; n < CHANNEL_BLOCKS; ++n)
            mma_long_sum(acc[m][n], a[m % 2][1], weights.block[n].z, weights.block[n].w);
    }
}

/// A patch's first pixel in device memory, before the channels of a step. It may be outside the frame.
struct alignas(16) PatchSource {
    const u8* corner;
    int left, top;
    int width, row_bytes;

    PatchSource() = default;

    __device__ __forceinline__ PatchSource(const Source& source, const Plane& plane, const FramePart& part, int slot,
                                           const Tile& tile) {
        left = tile.x * source.stride + plane.dx - part.first_column;
        top = tile.y * source.stride + plane.dy;
        const int pixel_bytes = source.channels * ELEMENT_BYTES;
        corner = part.frames + slot * part.slot_bytes + (static_cast<i64>(top) * part.width + left) * pixel_bytes;
        width = part.width, row_bytes = part.width * pixel_bytes;
    }
};

/// Which units of a patch a thread loads: one column of the tile, in every `ROWS`th row; then some of the halo's
/// columns. So places and addresses advance by constants. `UNITS`: of a pixel, for adjacent threads.
template <int LOADERS, int UNITS>
struct UnitWalk {
    static constexpr int PIXELS = LOADERS / UNITS, ROWS = PIXELS / TILE_COLS, PIXEL_BYTES = UNITS * UNIT_BYTES;
    static constexpr int PATCH_ROWS = TILE_ROWS + 2, HALO_PIXELS = 2 * PATCH_ROWS;
    static_assert(PIXELS % TILE_COLS == 0);
    int pixel, unit;

    __device__ __forceinline__ explicit UnitWalk(int thread) : pixel(thread / UNITS), unit(thread % UNITS) {}

    /// Units are swizzled by the column, so that ldmatrix has no conflicts of banks.
    __device__ __forceinline__ int place(int row, int col) const {
        constexpr int SHIFT = UNITS == 8 ? 0 : 1;
        return (row * PATCH_PITCH + col) * PIXEL_BYTES + ((unit ^ (col >> SHIFT & (UNITS - 1))) << 4);
    }

    /// Calls `visit(place)` for the units of a patch of 10 x 18 pixels.
    template <class Visit>
    __device__ __forceinline__ void for_each(Visit visit) const {
        const int first = place(pixel / TILE_COLS, pixel % TILE_COLS);
#pragma unroll
        for (int i = 0; i < PATCH_ROWS; i += ROWS) visit(first + i * PATCH_PITCH * PIXEL_BYTES);
#pragma unroll
        for (int i = pixel; i < HALO_PIXELS; i += PIXELS) visit(place(i / 2, TILE_COLS + i % 2));
    }

    /// Loads these units of channels, from `first_channel` on; zeros outside the frame. No byte is read there.
    __device__ __forceinline__ void load(const Source& source, const PatchSource& from, int first_channel,
                                         u32 to) const {
        const int channel = first_channel + unit * UNIT_CHANNELS, stride = source.stride, rows = source.rows;
        const int pixel_bytes = source.channels * ELEMENT_BYTES * stride, row_bytes = from.row_bytes * stride;
        const u8* const corner = from.corner + channel * ELEMENT_BYTES;
        const u32 width = channel < source.channels ? from.width : 0, height = source.height;
        {
            const int row = pixel / TILE_COLS, col = pixel % TILE_COLS;
            const u32 top = from.top + row * stride, place = to + this->place(row, col);
            const bool inside = static_cast<u32>(from.left + col * stride) < width;
            // Less than 2^31 bytes from the corner, whose address needs 64 bits.
            const u8* at = corner + (row * row_bytes + col * pixel_bytes);
#pragma unroll
            for (int i = 0; i < PATCH_ROWS; i += ROWS) {
                if (row + i < rows)
                    cp_async_16(place + i * PATCH_PITCH * PIXEL_BYTES, at, inside && top + i * stride < height);
                at += ROWS * row_bytes;
            }
        }
        // One or two columns of the halo, or none.
        const int halo = source.pitch - TILE_COLS;
        if (halo == 0) return;
#pragma unroll
        for (int i = pixel; i < HALO_PIXELS; i += PIXELS) {
            const int row = i >> (halo - 1), col = TILE_COLS + (i & (halo - 1));
            const u32 x = from.left + col * stride, y = from.top + row * stride;
            if (row < rows)
                cp_async_16(to + place(row, col), corner + (row * row_bytes + col * pixel_bytes),
                            x < width && y < height);
        }
    }
};
