// Bias and partial sums: what the epilogues of all convolutions share.
#pragma once
#include "statistics.cuh"

/// The partial sums a tile starts from, at its first pixel; null to start from zero.
__device__ __forceinline__ const float* tile_partial_in(const ConvParams& p, const Tile& tile) {
    if (tile.frame > 0 || !p.partial_in) return nullptr;
    return p.partial_in + (static_cast<i64>(tile.y) * p.width + tile.x) * p.cout;
}

/// Where a tile stores its sums as partial sums, at its first pixel; null if the tile is finished by this launch.
__device__ __forceinline__ float* tile_partial_out(const ConvParams& p, const Tile& tile) {
    if (tile.frame < p.frames - 1 || !p.partial_out) return nullptr;
    return p.partial_out + (static_cast<i64>(tile.y) * p.width + tile.x) * p.cout;
}

/// Offset of a pixel's partial sums from the tile's first pixel; -1 outside the frame.
__device__ __forceinline__ int partial_offset(const ConvParams& p, const Tile& tile, int2 pixel) {
    return pixel.y < p.height && pixel.x < p.width ? ((pixel.y - tile.y) * p.width + pixel.x - tile.x) * p.cout : -1;
}

/// The bias of all channels, for a frame and a tile's phase.
template <class Widths = Wide>
__device__ __forceinline__ const float* bias_of(const ConvParams& p, const FrameParams& frame, const Tile& tile,
                                                int edge) {
    const i64 row = (frame.bias * p.phases + tile.phase) * (p.phases == 4 ? 4 : 1) + edge;
    return p.bias + row * p.channel_tiles * Widths::COLUMNS;
}

/// The bias index of a pixel with Up: 1 in the phase's outer row, 2 in its outer column, 3 in both.
__device__ __forceinline__ int bias_edge(const ConvParams& p, const Tile& tile, int2 pixel) {
    const int row = tile.phase >> 1 ? p.height - 1 : 0, col = tile.phase & 1 ? p.width - 1 : 0;
    return (pixel.y == row) + 2 * (pixel.x == col);
}
