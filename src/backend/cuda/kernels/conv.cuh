// Parameters of the convolution kernels. `../launch/params.rs` mirrors every struct here, field for field.
//
// A convolution is a sum over (term, block of K_BLOCK input channels, plane, tap). Per (term, block, plane) a patch of
// input pixels with its halo is loaded to shared memory once. Each tap reads that patch at another offset, so the input
// crosses L2 once for all 9 taps of a 3x3 window. Windows differ only in this table:
//   Same   one plane, 9 taps            Point  one plane, 1 tap
//   Up     one plane of 4 taps for each of 4 phases
//   Down   four planes (parities of row and column) of 4, 2, 2 and 1 taps
#pragma once
#include "norm.cuh"

constexpr int ROW_BYTES = 128;      // a pixel of a patch, and an output channel of a weight tile; 128-byte swizzle
constexpr int TILE_CHANNELS = 128;  // output channels of a tile
constexpr int WEIGHT_TILE_BYTES = 16384;            // packed weights of one tap and K block
constexpr int K_BLOCK = ROW_BYTES / ELEMENT_BYTES;  // input channels of a patch
static_assert(WEIGHT_TILE_BYTES == TILE_CHANNELS * ROW_BYTES);

/// What a kernel multiplies at a time. `COLUMNS`: output channels of a tile. `ROW`: bytes of a pixel in a patch, and of
/// an output channel in a tile of weights. `CHANNELS`: input channels of both, and channels of a box of the output.
template <int COLUMNS_, int ROW_>
struct TileWidths {
    static constexpr int COLUMNS = COLUMNS_, ROW = ROW_, BYTES = COLUMNS * ROW, CHANNELS = ROW / ELEMENT_BYTES;
};
typedef TileWidths<TILE_CHANNELS, ROW_BYTES> Wide;
// For widths that 128 columns or 64 channels do not divide, such as 96 and 192.
constexpr int NARROW_CHANNELS = 96;   // output channels of a tile
constexpr int NARROW_ROW_BYTES = 64;  // a pixel of a patch, and an output channel of a weight tile; 64-byte swizzle
typedef TileWidths<NARROW_CHANNELS, NARROW_ROW_BYTES> Narrow;

/// A patch and its taps. Tap (i, j) reads the patch i rows further down and j columns further right.
struct Plane {
    // Corner of the patch relative to stride * (tile corner). For a band, `dy` counts from its first row in memory.
    int dx, dy;
    int rows, cols;  // taps
};

/// Input frames of one shape, and their weights.
struct Source {
    const u8* weights;  // [slab][phase][channel tile][K block][plane][tap] tiles, in one of two orders (WeightOrder)
    int height, channels;
    int k_blocks, taps;  // taps of one phase
    int rows, pitch;     // patch, in pixels
    int stride;          // input pixels between adjacent patch pixels
    int planes;          // planes of one phase
    int patch_bytes;     // rows * pitch * ROW_BYTES
    Plane plane[4];
};

/// Where input frames, or a range of their columns, are in device memory.
struct FramePart {
    const u8* frames;  // slot 0
    i64 slot_bytes;
    int width;
    int first_column;
};

/// Whole frames of the main source and of the shortcut. Cached frames may be split by column instead: the left columns
/// are resident, the right ones were copied from host memory. Both parts hold the halo column across the split.
/// Frames whose even and odd columns are apart are never split: then the other two parts are their odd columns.
enum { MAIN = 0, SHORTCUT = 1, RESIDENT = 2, HOST = 3, PARTS = 4, MAIN_ODD = RESIDENT, SHORTCUT_ODD = HOST };

constexpr int MAX_TERMS = 4;      // three frames in time, and the shortcut
constexpr int SHORTCUT_TERM = 3;  // its index in `slot`, `slab` and `host_slot`

/// One output frame.
struct FrameParams {
    int slot[MAX_TERMS];  // -1 for no shortcut
    int slab[MAX_TERMS];
    int host_slot[MAX_TERMS];  // slot in HOST of a split frame, else -1
    int terms;                 // without the shortcut
    int bias;
    int residual;  // slot, or -1
    int out;       // slot
    int record;    // kernels of pairs: index of its statistics records
};

struct ConvParams {
    // Tensor maps, for sm_90a only. Inputs and residual: (channel, column, row, slot). Output: (channel, column, row of
    // a phase, row, slot). With Up, the two columns of a phase are adjacent channels. Of residual and output there are
    // two, if even and odd columns are apart.
    TensorMap input_map[PARTS], residual_map[2], out_map[2];
    Source source[2];  // main, shortcut
    FramePart part[PARTS];
    u8* out;
    const u8* residual;
    const float* bias;  // [bias][phase][edge][padded cout]. Up has 4 phases and 4 edges, all others 1
    float2* records;    // statistics records, [frame][record][padded cout / 4]: mean, M2; null for none
    // Partial sums [row][column][channel], or null. The first frame starts from `partial_in`. The last frame has no
    // other output than `partial_out`. The two never overlap.
    const float* partial_in;
    float* partial_out;
    i64 out_slot_bytes, residual_slot_bytes;
    int height, width;  // tile grid: the output of one phase, or its even columns
    int missing_columns;  // 1 if a frame whose even and odd columns are apart has one odd column less
    int first_row;      // of the band of `tiles_y` rows of tiles
    int tiles_x, tiles_y, channel_tiles, phases, frames;
    int cout;
    int split_column;  // tiles left of it read split frames from RESIDENT, the others from HOST
    int tile_rows;     // conv_wgmma: 16 for tiles of 16 x 16 pixels, 8 for 8 x 32
    int run;           // conv_in: adjacent tiles that a block computes
    FrameParams frame[MAX_FRAMES];
    // conv_in_norm and conv_in_silu: the next layer's norm, and the slot of each frame's statistics.
    Norm norm;
    int statistics[MAX_FRAMES];
};
