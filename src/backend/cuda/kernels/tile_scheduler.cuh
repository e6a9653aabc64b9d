// Tile scheduler of the convolutions: which tile a block computes, and the order of the patches in its sum.
#pragma once
#include "conv.cuh"

/// A tile of work. Channel tiles, phases, then frames vary fastest: tiles in flight together then share their input in
/// L2, because adjacent output frames read the same input frames.
struct Tile {
    int channel_tile, phase, frame, x, y;

    Tile() = default;

    __device__ __forceinline__ Tile(const ConvParams& p, int index, int tile_rows, int tile_cols) {
        channel_tile = index % p.channel_tiles;
        index /= p.channel_tiles;
        phase = index % p.phases;
        index /= p.phases;
        frame = index % p.frames;
        index /= p.frames;
        x = index % p.tiles_x * tile_cols;
        y = index / p.tiles_x * tile_rows + p.first_row;
    }

    static __device__ __forceinline__ int count(const ConvParams& p) {
        return p.tiles_x * p.tiles_y * p.frames * p.phases * p.channel_tiles;
    }
};

/// Two adjacent output frames. One may be missing.
struct FramePair {
    const FrameParams* frame;  // two

    __device__ __forceinline__ FramePair(const ConvParams& p, const Tile& tile) : frame(p.frame + 2 * tile.frame) {}
    __device__ __forceinline__ bool has(int i) const { return frame[i].terms > 0; }
    __device__ __forceinline__ const FrameParams& any() const { return frame[!has(0)]; }
};

/// The weight tiles of one term, in the order of the sum.
template <class Widths = Wide>
__device__ __forceinline__ const u8* weight_tiles(const ConvParams& p, const Source& source, bool shortcut, int slab,
                                                  const Tile& tile) {
    const i64 phase = shortcut ? 0 : slab * p.phases + tile.phase;
    return source.weights +
           (phase * p.channel_tiles + tile.channel_tile) * source.k_blocks * source.taps * Widths::BYTES;
}

struct InputFrame {
    int part, slot;
};

__device__ __forceinline__ int input_part(const ConvParams& p, const FrameParams& frame, int term, const Tile& tile) {
    if (frame.host_slot[term] >= 0) return tile.x < p.split_column ? RESIDENT : HOST;
    return term == SHORTCUT_TERM ? SHORTCUT : MAIN;
}

/// Where a tile reads the frame of a term.
__device__ __forceinline__ InputFrame input_frame(const ConvParams& p, const FrameParams& frame, int term,
                                                  const Tile& tile) {
    const int part = input_part(p, frame, term, tile);
    return {part, part == HOST ? frame.host_slot[term] : frame.slot[term]};
}

/// One patch of a tile, and the weights of its taps.
struct PatchStep {
    const Source& source;
    const Plane& plane;
    const u8* weights;
    InputFrame input;
    int k_block;
};

/// Calls `visit(step)` for each patch of a tile, in the order of the sum, but for the first `skipped`.
template <class Widths = Wide, class Visit>
__device__ __forceinline__ void for_each_patch(const ConvParams& p, const Tile& tile, Visit visit, int skipped = 0) {
    const FrameParams& frame = p.frame[tile.frame];
    const int terms = frame.terms + (frame.slot[SHORTCUT_TERM] >= 0);
    for (int i = 0; i < terms; ++i) {
        const bool shortcut = i == frame.terms;
        const int term = shortcut ? SHORTCUT_TERM : i;
        const Source& source = p.source[shortcut];
        const int first = shortcut ? 0 : tile.phase * source.planes;
        const u8* weights = weight_tiles<Widths>(p, source, shortcut, frame.slab[term], tile);
        const InputFrame input = input_frame(p, frame, term, tile);
        for (int k_block = 0; k_block < source.k_blocks; ++k_block)
            for (int j = 0; j < source.planes; ++j) {
                const Plane& plane = source.plane[first + j];
                if (skipped > 0) --skipped;
                else visit(PatchStep{source, plane, weights, input, k_block});
                weights += plane.rows * plane.cols * Widths::BYTES;
            }
    }
}

__device__ __forceinline__ PatchStep first_patch(const ConvParams& p, const Tile& tile) {
    const FrameParams& frame = p.frame[tile.frame];
    const Source& source = p.source[0];
    return {source, source.plane[tile.phase * source.planes], weight_tiles(p, source, false, frame.slab[0], tile),
            input_frame(p, frame, 0, tile), 0};
}
