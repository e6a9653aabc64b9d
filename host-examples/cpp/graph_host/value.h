// What travels along a link: a tensor with its memory.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "video_vae.h"

namespace host {

using Shape = std::array<int64_t, 5>; // B, C, T, H, W

struct Value {
    std::vector<uint8_t> bytes;
    uint32_t dtype = 0;
    Shape shape{};
    std::optional<Shape> strides; // none: compact
    // The clip that it is, or was made from. Latents stand for 4n+1 frames and multiples of 8 pixels; this says how
    // many of them there really were, so that decode gives a clip of the length and size that encode was given.
    Shape clip{};

    // The library does not keep it; valid while the value stays where it is.
    vvae_tensor tensor() {
        return {bytes.data(), VVAE_DEVICE_CPU, 0, 5, dtype, shape.data(), strides ? strides->data() : nullptr, 0};
    }

    // Frames of bytes [1, channels, T, H, W], pixel by pixel, as files have them. Strides tell the library so, and
    // nobody copies.
    static Value frames(const Shape &shape) {
        auto [batch, channels, count, height, width] = shape;
        Value value;
        value.bytes.resize(static_cast<std::size_t>(batch * channels * count * height * width));
        value.dtype = VVAE_DTYPE_U8;
        value.shape = value.clip = shape;
        value.interleave();
        return value;
    }

    // The strides of pixels one behind the other.
    void interleave() {
        int64_t row = shape[4] * shape[1], frame = shape[3] * row;
        strides = Shape{shape[2] * frame, 1, frame, row, shape[1]};
    }

    static Value floats(const Shape &shape, const Shape &clip) {
        Value value;
        value.bytes.resize(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3] * shape[4]) * 4);
        value.dtype = VVAE_DTYPE_F32;
        value.shape = shape;
        value.clip = clip;
        return value;
    }
};

} // namespace host
