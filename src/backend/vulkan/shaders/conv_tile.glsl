// What all convolutions share: tiles, where their inputs and weights are, and the epilogue.

const int TILE_ROWS = 8, TILE_COLUMNS = 16, PIXELS = TILE_ROWS * TILE_COLUMNS;
const int WEIGHT_BLOCK = 32;  // input channels of weights come in so many
const int OWN_PIXELS = 8;     // of a thread, side by side
const int PAIR_CHANNELS = 32; // output channels that go through the epilogue at a time
const int PAIRS = TILE_CHANNELS / PAIR_CHANNELS;
const int OWN_CHANNELS = PIXELS * PAIR_CHANNELS / THREADS / OWN_PIXELS;
const int PARTS = PIXELS / OWN_PIXELS;  // threads that share a channel

layout(local_size_x = THREADS) in;
layout(push_constant, scalar) uniform Push { ConvParams p; };

struct Tile {
    int top, left;  // of the tile grid
    int channel;    // the first output channel
    int phase, frame, row;
};

Tile own_tile() {
    const int z = int(gl_WorkGroupID.z), tiles = p.channel_tiles;
    Tile tile;
    tile.channel = z % tiles * TILE_CHANNELS;
    tile.phase = z / tiles % p.phases;
    tile.frame = z / tiles / p.phases;
    tile.row = p.first_row / TILE_ROWS + int(gl_WorkGroupID.y);
    tile.top = tile.row * TILE_ROWS;
    tile.left = int(gl_WorkGroupID.x) * TILE_COLUMNS;
    return tile;
}

/// Where a tap finds its pixels.
struct InputTap {
    uint64_t frame;
    int row_offset, column_offset;
    int first_column, pitch;  // of the part of a frame
};

InputTap input_tap(Tile tile, Term term, int tap) {
    const Source source = p.source[term.source];
    const bool is_up = p.phases > 1 && term.source == 0;
    const bool in_host = term.host != 0 && tile.left >= p.split_column;
    InputTap from;
    from.frame = in_host ? term.host : term.frame;
    from.row_offset = tap / source.side + source.offset + (is_up ? tile.phase / 2 : 0);
    from.column_offset = tap % source.side + source.offset + (is_up ? tile.phase % 2 : 0);
    from.first_column = in_host ? p.host_first : 0;
    from.pitch = term.host == 0 ? source.width : in_host ? p.host_width : p.resident_width;
    return from;
}

/// Four channels of a pixel of the tile; 0 where there are none.
uint64_t input_address(Tile tile, Source source, InputTap from, int pixel, int channel) {
    const int row = tile.top + pixel / TILE_COLUMNS, column = tile.left + pixel % TILE_COLUMNS;
    const int y = row * source.stride + from.row_offset, x = column * source.stride + from.column_offset;
    const bool inside = y >= 0 && y < source.height && x >= 0 && x < source.width;
    if (!inside || row >= p.height || column >= p.width || channel >= source.channels) return 0;
    const int64_t at = int64_t(y - source.first_row) * from.pitch + (x - from.first_column);
    return from.frame + uint64_t(at * source.channels + channel) * ELEMENT_BYTES;
}

/// Of one tap, whose input channels fill up blocks.
int64_t tap_bytes(Source source) { return int64_t(source.k_blocks) * WEIGHT_BLOCK * p.padded_cout * ELEMENT_BYTES; }

/// The weights of a tap, from the first input and output channel on.
uint64_t tap_weights(Tile tile, Term term, int tap) {
    const Source source = p.source[term.source];
    // A shortcut has one tap for all phases.
    const int first = term.source == 0 ? tile.phase * source.side * source.side : 0;
    return source.weights + term.slab * source.slab_bytes + uint64_t((first + tap) * tap_bytes(source));
}

/// The first of a thread's channels of a pair.
int own_channel() { return int(gl_LocalInvocationIndex) % (PAIR_CHANNELS / OWN_CHANNELS) * OWN_CHANNELS; }

/// Which of the threads of a channel this one is.
int own_part() { return int(gl_LocalInvocationIndex) / (PAIR_CHANNELS / OWN_CHANNELS); }

/// Pixel `i` of a thread.
int own_pixel(int i) { return own_part() * OWN_PIXELS + i; }

/// Biases of this thread's channels. Edges of an upsampler have their own: 1 in the phase's outer row, 2 in its outer
/// column, 3 in both.
Own load_bias(Tile tile, uint bias, int y, bool outer_column, int channel) {
    int row = int(bias);
    if (p.phases > 1) {
        const bool outer_row = y == (tile.phase / 2 == 0 ? 0 : p.height - 1);
        row = row * 16 + tile.phase * 4 + (outer_row ? 1 : 0) + (outer_column ? 2 : 0);
    }
    return load_floats(p.bias + uint64_t(int64_t(row) * p.padded_cout + channel) * 4);
}

/// Adds bias and residual to the sums of a pair and stores them. Their moments go to shared memory.
void finish_pair(Tile tile, OutFrame frame, int pair, Own sums[OWN_PIXELS]) {
    const int by = p.phases > 1 ? 2 : 1, channel = tile.channel + pair * PAIR_CHANNELS + own_channel();
    const int y = tile.top + own_pixel(0) / TILE_COLUMNS, x = tile.left + own_pixel(0) % TILE_COLUMNS;
    const int count = y < p.height ? clamp(p.width - x, 0, OWN_PIXELS) : 0;
    Own total = Own(0.0);
    if (count > 0) {
        const bool is_stored = channel < p.cout;
        const int64_t row = int64_t(y) * by + (by == 2 ? tile.phase / 2 : 0);
        const int64_t pixel = row * (int64_t(p.width) * by) + x * by + (by == 2 ? tile.phase % 2 : 0);
        const uint64_t at = uint64_t(pixel * p.cout + channel) * ELEMENT_BYTES;
        const uint step = uint(by * p.cout) * ELEMENT_BYTES;
        Own residual[OWN_PIXELS];
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) {
            residual[i] = Own(0.0);
            if (is_stored && frame.residual != 0 && i < count) residual[i] = load_own(frame.residual + at + i * step);
        }
        const Own inner = load_bias(tile, frame.bias, y, false, channel), outer = load_bias(tile, frame.bias, y, true, channel);
        const int outer_x = p.phases == 1 ? -1 : tile.phase % 2 == 0 ? 0 : p.width - 1;
        [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) {
            Own value = sums[i] + (x + i == outer_x ? outer : inner);
            if (frame.residual != 0) value += residual[i];
            const OwnPacked stored = pack_own(value);
            if (is_stored && i < count) store_own(frame.target + at + i * step, stored);
            sums[i] = unpack_own(stored);
            if (i < count) total += sums[i];
        }
    }
    const Own mean = count > 0 ? total / float(count) : Own(0.0);
    Own squares = Own(0.0);
    [[unroll]] for (int i = 0; i < OWN_PIXELS; ++i) {
        const Own difference = sums[i] - mean;
        if (i < count) squares += difference * difference;
    }
    [[unroll]] for (int e = 0; e < OWN_CHANNELS; ++e) {
        put_moment(own_part() * PAIR_CHANNELS + own_channel() + e, mean[e]);
        put_moment((PARTS + own_part()) * PAIR_CHANNELS + own_channel() + e, squares[e]);
    }
}

/// Merges the moments of the threads that have pixels of the same channel: mean, and sum of squared deviations.
void store_records(Tile tile, uint record, int pair) {
    const int channel = int(gl_LocalInvocationIndex);
    if (p.records == 0 || channel >= PAIR_CHANNELS) return;
    const int rows = min(p.height - tile.top, TILE_ROWS), columns = min(p.width - tile.left, TILE_COLUMNS);
    float total = 0.0, squares = 0.0;
    [[unroll]] for (int part = 0; part < PARTS; ++part) {
        const float count = part / 2 < rows ? float(clamp(columns - part % 2 * OWN_PIXELS, 0, OWN_PIXELS)) : 0.0;
        total += count * moment(part * PAIR_CHANNELS + channel);
    }
    const float mean = total / float(rows * columns);
    [[unroll]] for (int part = 0; part < PARTS; ++part) {
        const float count = part / 2 < rows ? float(clamp(columns - part % 2 * OWN_PIXELS, 0, OWN_PIXELS)) : 0.0;
        const float difference = moment(part * PAIR_CHANNELS + channel) - mean;
        squares += moment((PARTS + part) * PAIR_CHANNELS + channel) + count * difference * difference;
    }
    const int tiles_x = (p.width + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles_y = (p.height + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t tile_index = (int64_t(record * p.phases + tile.phase) * tiles_y + tile.row) * tiles_x + int(gl_WorkGroupID.x);
    const int64_t at = tile_index * p.padded_cout + tile.channel + pair * PAIR_CHANNELS + channel;
    Float2(p.records + uint64_t(at) * 8).value = vec2(mean, squares);
}
