// The parameters of norms, field for field as `launch/params.rs` has them.

struct NormFrame {
    uint64_t from;
    uint64_t to;  // may be `from`
    uint64_t statistics;
};

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer NormParams {
    uint64_t gamma, beta;  // padded with zeros, like channels
    uint64_t pixels;
    uint channels;  // of a pixel in memory
    uint groups, group_channels;
    uint silu;
    NormFrame frame[MAX_FRAMES];
};
