// What the attention kernels share.
#pragma once
#include "common.cuh"

constexpr int MAX_CHANNELS = 512;
#define INFINITE __int_as_float(0x7f800000)

struct AttentionParams {
    TensorMap map;  // attention_wgmma: (channel; query, key or value; pixel; slot), boxes of 64 channels by 32 pixels
    const u8* in;   // frames [pixel][query, key, value][channels]
    u8* out;        // frames [pixel][channels]
    i64 in_slot_bytes, out_slot_bytes;
    int pixels;
    int channels;     // a multiple of 8, at most MAX_CHANNELS
    int first_query;  // of the launch
    int in_slot[MAX_FRAMES], out_slot[MAX_FRAMES];
};
