// A frame of a host tensor, or its staging buffer, and its elements.

// Codes of `Strided.dtype`; any other is f32.
const uint U8 = 0x00010801u, U16 = 0x00011001u, F16 = 0x00011002u, BF16 = 0x00011004u;

struct Strided {
    uint64_t data;
    int64_t by_channel, by_row, by_column;  // in elements
    uint dtype;
    int channels, height, width;
};

uint64_t element_at(Strided tensor, int c, int y, int x, uint bytes) {
    return tensor.data + uint64_t((c * tensor.by_channel + y * tensor.by_row + x * tensor.by_column) * int(bytes));
}

float read_element(Strided tensor, int c, int y, int x) {
    switch (tensor.dtype) {
        case U8: return float(uint(Byte(element_at(tensor, c, y, x, 1)).value));
        case U16: return float(uint(Short(element_at(tensor, c, y, x, 2)).value));
        case F16: return from_half(uint(Short(element_at(tensor, c, y, x, 2)).value));
        case BF16: return uintBitsToFloat(uint(Short(element_at(tensor, c, y, x, 2)).value) << 16);
        default: return Float(element_at(tensor, c, y, x, 4)).value;
    }
}

/// Integers are rounded to nearest even and clamped; NaN becomes 0.
uint whole(float value, float most) { return value != value ? 0u : uint(clamp(roundEven(value), 0.0, most)); }

void write_element(Strided tensor, int c, int y, int x, float value) {
    switch (tensor.dtype) {
        case U8: Byte(element_at(tensor, c, y, x, 1)).value = uint8_t(whole(value, 255.0)); return;
        case U16: Short(element_at(tensor, c, y, x, 2)).value = uint16_t(whole(value, 65535.0)); return;
        case F16: Short(element_at(tensor, c, y, x, 2)).value = uint16_t(half_of(value)); return;
        case BF16: Short(element_at(tensor, c, y, x, 2)).value = uint16_t(bfloat_of(value)); return;
        default: Float(element_at(tensor, c, y, x, 4)).value = value;
    }
}
