// What a convolution launch is told, and how its work is cut. Shared by every convolution kernel.
//
// A convolution is a sum over (term, chunk of 64 or, in f32, 32 input channels, plane, tap). For each (term, chunk, plane) a patch of
// input pixels, halo included, goes to shared memory once; each tap then reads the same patch at another offset. So
// the input crosses the L2 cache once for all 9 taps of a 3x3 window, and windows differ only in this table:
//   Same   one plane, 9 taps            Point  one plane, 1 tap
//   Up     one plane of 4 taps for each of 4 phases
//   Down   four planes (parities of row and column) of 4, 2, 2 and 1 taps
#pragma once
#include "norm.cuh"

constexpr int ROW = 128;             // bytes of a pixel in a patch, and of a column in a tile of weights: swizzled
constexpr int CHUNK = ROW / ELEMENT;  // input channels of a patch
constexpr int COLUMNS = 128;         // output channels of a tile
constexpr int WEIGHT_TILE = COLUMNS * ROW;        // bytes of packed weights for one tap and chunk
constexpr int RECORD_ROWS = 8, RECORD_COLS = 16;  // pixels that one record of partial statistics covers
constexpr int MAX_FRAMES = 32;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

/// A patch and the taps that read it: tap (i, j) sees the patch i rows further down and j columns further right.
struct Plane {
    int dx, dy;      // pixel of the patch's corner in the source's frames, relative to stride * (tile corner); a source that
                     // holds a band of rows has the band's first row taken off dy
    int rows, cols;  // of taps
};

/// Input frames of one shape with the weights that go with them.
struct Source {
    const u8* weights;  // tiles [slab][phase][column tile][chunk][plane][tap], each [128 columns][chunk], swizzled
    int height, channels;
    int chunks, taps;        // taps of one phase
    int rows, pitch;         // of a patch, in pixels
    int stride;              // input pixels between neighbouring patch pixels
    int planes;              // of one phase
    int patch_bytes;         // rows * pitch * 128
    Plane plane[4];
};

/// Where input frames lie, or some of their columns.
struct Place {
    const u8* frames;  // slot 0
    i64 slot_bytes;
    int width;
    int first;  // column that they begin with
};

enum { MAIN, SHORTCUT, NEAR, FAR, PLACES };

/// One output frame. `slot[3]` is the shortcut's input, -1 when there is none.
struct Frame {
    int slot[4];
    int slab[4];
    int far[4];  // of frames that are parted, the slot in FAR; -1 for all others
    int terms;
    int bias;
    i64 residual;  // slot, -1 for none
    i64 out;       // slot
};

struct ConvParams {
    // Used on sm_90a only. Input and residual frames: (channel, column, row, slot). Output: (channel, column,
    // row of a phase, row, slot); with Up the two columns of a phase count as channels side by side.
    TensorMap map[PLACES], residual_map, out_map;
    Source source[2];  // main, shortcut
    Place place[PLACES];
    u8* out;
    const u8* residual;
    const float* bias;  // [bias][phase][edge][padded cout]; phases and edges are 1 but for Up, which has 4 of each
    float2* partials;   // [frame][record][padded cout / 4]: mean, sum of squared differences; null: no statistics
    // Sums of products as [row][column][channel], null for none: what the first frame begins with, and what the last one, which
    // has no other output, leaves for a frame of another launch.
    const float* before;
    float* after;
    i64 out_slot_bytes, residual_slot_bytes;
    int height, width;  // of the output of one phase, which tiles cover
    int first_row;      // of the tiles of this launch: a band of rows, of which there are tiles_y
    int tiles_x, tiles_y, column_tiles, phases, frames;
    int cout;
    int parting;        // tiles to the left of it find all they see of parted frames in NEAR, the others in FAR
    int tile_rows;      // wgmma kernel: 16, or 8 for tiles of 8 x 32 pixels
    int ahead;          // mma.sync kernel: weight tiles fetched ahead
    int run;            // kernel from pixels: tiles side by side that a block goes through
    Frame frame[MAX_FRAMES];
    // conv_in_norm and conv_in_silu: that of the layer that reads the output, with where the statistics of each frame lie.
    Norm norm;
    int statistics[MAX_FRAMES];
};

/// A tile of work. Column tiles, then phases, then frames run fastest, so that tiles in flight together share their
/// input in L2: neighbouring output frames see the same input frames.
struct Tile {
    int column, phase, frame, x, y;

    Tile() = default;

    __device__ __forceinline__ Tile(const ConvParams& p, int index, int tile_rows, int tile_cols) {
        column = index % p.column_tiles;
        index /= p.column_tiles;
        phase = index % p.phases;
        index /= p.phases;
        frame = index % p.frames;
        index /= p.frames;
        x = index % p.tiles_x * tile_cols;
        y = index / p.tiles_x * tile_rows + p.first_row;
    }

    static __device__ __forceinline__ int count(const ConvParams& p) {
        return p.tiles_x * p.tiles_y * p.frames * p.phases * p.column_tiles;
    }
};

/// The tiles of weights that one term of a tile needs, in the order it needs them.
__device__ __forceinline__ const u8* weight_run(const ConvParams& p, const Source& source, bool shortcut, int slab,
                                                const Tile& tile) {
    const i64 phase = shortcut ? 0 : slab * p.phases + tile.phase;
    return source.weights + (phase * p.column_tiles + tile.column) * source.chunks * source.taps * WEIGHT_TILE;
}

/// Where a tile finds an input frame.
__device__ __forceinline__ int place_of(const ConvParams& p, const Frame& frame, int entry, const Tile& tile) {
    if (frame.far[entry] >= 0) return tile.x < p.parting ? NEAR : FAR;
    return entry == 3 ? SHORTCUT : MAIN;
}

/// A patch of a tile, and what is done with it.
struct Step {
    const Source& source;
    const Plane& plane;
    const u8* weights;
    int place, slot, chunk;
};

/// Calls `visit(step)` for each patch of a tile, in the order of the sum.
template <class Visit>
__device__ __forceinline__ void for_each_patch(const ConvParams& p, const Tile& tile, Visit visit) {
    const Frame& frame = p.frame[tile.frame];
    const int terms = frame.terms + (frame.slot[3] >= 0);
    for (int term = 0; term < terms; ++term) {
        const bool shortcut = term == frame.terms;
        const int entry = shortcut ? 3 : term;
        const Source& source = p.source[shortcut];
        const int first = shortcut ? 0 : tile.phase * source.planes;
        const u8* weights = weight_run(p, source, shortcut, frame.slab[entry], tile);
        const int place = place_of(p, frame, entry, tile), slot = place == FAR ? frame.far[entry] : frame.slot[entry];
        for (int chunk = 0; chunk < source.chunks; ++chunk)
            for (int i = 0; i < source.planes; ++i) {
                const Plane& plane = source.plane[first + i];
                visit(Step{source, plane, weights, place, slot, chunk});
                weights += plane.rows * plane.cols * WEIGHT_TILE;
            }
    }
}

/// What a tile's sums begin with, and where they are left as they are, at its first pixel; null where they begin with nothing, and
/// are finished.
__device__ __forceinline__ const float* sums_before(const ConvParams& p, const Tile& tile) {
    if (tile.frame > 0 || !p.before) return nullptr;
    return p.before + (static_cast<i64>(tile.y) * p.width + tile.x) * p.cout;
}

__device__ __forceinline__ float* sums_after(const ConvParams& p, const Tile& tile) {
    if (tile.frame < p.frames - 1 || !p.after) return nullptr;
    return p.after + (static_cast<i64>(tile.y) * p.width + tile.x) * p.cout;
}

/// How far from there those of a pixel are; -1 outside of the frame.
__device__ __forceinline__ int sums_at(const ConvParams& p, const Tile& tile, int2 at) {
    return at.y < p.height && at.x < p.width ? ((at.y - tile.y) * p.width + at.x - tile.x) * p.cout : -1;
}

/// The bias of all columns for a tile's frame and phase.
__device__ __forceinline__ const float* bias_of(const ConvParams& p, const Tile& tile, int edge) {
    const i64 row = (p.frame[tile.frame].bias * p.phases + tile.phase) * (p.phases == 4 ? 4 : 1) + edge;
    return p.bias + row * p.column_tiles * COLUMNS;
}

/// Which bias a pixel of the tile grid has, with Window::Up: 1 in the phase's outer row, 2 in its outer column, 3 in both.
__device__ __forceinline__ int bias_edge(const ConvParams& p, const Tile& tile, int2 at) {
    const int row = tile.phase >> 1 ? p.height - 1 : 0, col = tile.phase & 1 ? p.width - 1 : 0;
    return (at.y == row) + 2 * (at.x == col);
}
