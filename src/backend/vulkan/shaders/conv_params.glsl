// The parameters of a convolution, field for field as `launch/params.rs` has them.

/// Input frames of one shape, and their weights: [slab][tap][channel][output channel].
struct Source {
    uint64_t weights;
    uint64_t slab_bytes;
    int height, width;
    int first_row;  // the row that the addresses of frames begin with
    int channels;   // of a pixel in memory
    int k_blocks;
    int side;    // taps in rows and columns
    int stride;  // input pixels from one output pixel to the next
    int offset;  // from an output pixel's first input pixel to its first tap
};

struct Term {
    uint64_t frame;
    uint64_t host;  // the host part of a split frame, or 0
    uint slab;
    uint source;
};

struct OutFrame {
    Term term[4];
    uint64_t residual;  // or 0
    uint64_t target;
    uint terms;
    uint bias;
    uint record;
    uint unused;
};

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer ConvParams {
    Source source[2];
    uint64_t bias;
    uint64_t records;  // or 0
    int height, width;  // of the tile grid
    int first_row;      // of the launch
    int channel_tiles;
    int phases;
    int cout;         // of a pixel in memory
    int padded_cout;  // of weights and records
    int split_column, resident_width, host_first, host_width;
    int unused;
    OutFrame frame[MAX_FRAMES];
};
