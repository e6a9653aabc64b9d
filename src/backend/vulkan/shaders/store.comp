#version 460
// Activations to a frame of a host tensor. A thread for each pixel.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tensor.glsl"

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer StoreParams {
    Strided into;
    uint64_t from;
    uint64_t rows, columns;  // sums of the fades, or 0
    uint64_t nonfinite;      // a word that is set if a value is not finite
    uint64_t maps;           // as in LoadParams
    int width;               // of the activations
    int channels;            // of a pixel in memory
    int channel;
    int logvar;  // the channel of the log-variance of channel 0, or -1 for no sample
    float clamp_low, clamp_high;
    float mul, add;
    uint seed_low, seed_high;
    uint batch, frame;
    int patch_side, side;  // as in LoadParams
};
layout(local_size_x = 256) in;
layout(push_constant, scalar) uniform Push { StoreParams p; };

float channel_of(uint64_t pixel, int channel) {
    const vec2 pair = load2(pixel + uint64_t(channel & ~1) * ELEMENT_BYTES);
    return (channel & 1) == 0 ? pair.x : pair.y;
}

/// ln(1 + x) for x from -0.5 to 0, as 2 artanh(x / (2 + x)).
float log_one_plus(float x) {
    precise float z = x / (2.0 + x);
    precise float s = z * z;
    precise float series = 1.0 / 13.0;
    series = series * s + 1.0 / 11.0;
    series = series * s + 1.0 / 9.0;
    series = series * s + 1.0 / 7.0;
    series = series * s + 0.2;
    series = series * s + 1.0 / 3.0;
    series = series * s;
    precise float sum = 2.0 * z * series + 2.0 * z;
    return sum;
}

/// -ln((n + 1) / 2^32).
float minus_log(uint n) {
    if (n == 0xffffffffu) return 0.0;
    // The argument is m / 2^shift with m / 2^32 from 0.5 to 1.
    const uint m = n + 1u;
    const int shift = 31 - findMSB(m);
    // From one downwards exactly, so that little is lost where the logarithm is small.
    precise float below = -float(~(m << shift) + 1u) / 4294967296.0;
    precise float sum = float(shift) * 0.6931471806 - log_one_plus(below);
    return sum;
}

/// cos(2 pi n / 2^32).
float cosine(uint n) {
    // Within an eighth of a turn of a quarter turn.
    const uint quarter = (n + 0x20000000u) >> 30;
    precise float x = float(int(n - (quarter << 30))) * 1.4629180792671596e-9;
    precise float s = x * x;
    precise float even = -1.0 / 3628800.0;
    even = even * s + 1.0 / 40320.0;
    even = even * s - 1.0 / 720.0;
    even = even * s + 1.0 / 24.0;
    even = even * s - 0.5;
    even = even * s + 1.0;
    precise float odd = 1.0 / 362880.0;
    odd = odd * s - 1.0 / 5040.0;
    odd = odd * s + 1.0 / 120.0;
    odd = odd * s - 1.0 / 6.0;
    odd = odd * s + 1.0;
    odd = odd * x;
    return quarter == 0 ? even : quarter == 1 ? -odd : quarter == 2 ? -even : odd;
}

/// Philox 4x32-10 and Box-Muller, as on the CPU but in f32.
float normal(uint x, uint y, uint last) {
    uvec4 c = uvec4(x, y, p.frame, last);
    uvec2 key = uvec2(p.seed_low, p.seed_high);
    for (int round = 0; round < 10; ++round) {
        uint a_high, a_low, b_high, b_low;
        umulExtended(0xD2511F53u, c.x, a_high, a_low);
        umulExtended(0xCD9E8D57u, c.z, b_high, b_low);
        c = uvec4(b_high ^ c.y ^ key.x, b_low, a_high ^ c.w ^ key.y, a_low);
        key += uvec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return sqrt(2.0 * minus_log(c.x)) * cosine(c.y);
}

/// Where a value of the tensor is in activations, and which noise it has.
struct Place {
    int channel, row, column;
    int noise_channel, noise_row, noise_column;
};

Place place_of(int c, int y, int x) {
    if (p.maps != 0) {
        const int channel = c / (p.side * p.side), row = y * p.side + c / p.side % p.side, column = x * p.side + c % p.side;
        return Place(channel, row, column, channel, row, column);
    }
    const int channel = (c * p.patch_side + x % p.patch_side) * p.patch_side + y % p.patch_side;
    return Place(channel, y / p.patch_side, x / p.patch_side, c, y, x);
}

void main() {
    const int x = int(gl_GlobalInvocationID.x), y = int(gl_WorkGroupID.y);
    if (x >= p.into.width) return;
    bool finite = true;
    for (int c = 0; c < p.into.channels; ++c) {
        const Place at = place_of(c, y, x);
        const uint64_t from = p.from + (uint64_t(at.row) * p.width + at.column) * p.channels * ELEMENT_BYTES;
        float scale = 1.0;
        if (p.rows != 0) {
            const float row_fade = Float(p.rows + uint64_t(at.row) * 4).value;
            scale = 1.0 / max(row_fade * Float(p.columns + uint64_t(at.column) * 4).value, 1e-6);
        }
        precise float value = channel_of(from, p.channel + at.channel) * scale;
        // Comparisons, not min and max: NaN stays NaN.
        if (value < p.clamp_low) value = p.clamp_low;
        if (value > p.clamp_high) value = p.clamp_high;
        if (p.logvar >= 0) {
            const float logvar = clamp(channel_of(from, p.logvar + at.noise_channel) * scale, -30.0, 20.0);
            const float noise = normal(at.noise_column, at.noise_row, at.noise_channel + (p.batch << 16));
            value = value + exponential(0.5 * logvar) * noise;
        }
        finite = finite && is_finite(value);
        vec2 map = vec2(p.mul, p.add);
        if (p.maps != 0) map = Float2(p.maps + uint64_t(c) * 8).value;
        precise float mapped = fma(value, map.x, map.y);
        write_element(p.into, c, y, x, mapped);
    }
    if (!finite) Word(p.nonfinite).value = 1;
}
