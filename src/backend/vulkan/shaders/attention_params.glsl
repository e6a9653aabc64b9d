// The parameters of attention, field for field as `launch/params.rs` has them.

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer AttentionParams {
    uint pixels;
    uint channels;
    uint first_query;
    uint input_channels;  // of a pixel of the input in memory
    uint out_channels;
    uint unused;
    uint64_t from[MAX_FRAMES];
    uint64_t to[MAX_FRAMES];
};
