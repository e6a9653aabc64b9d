// Elements of frames and weights, and arithmetic that is the same on every device. Elements are f16; bf16 with
// VVAE_BF16; f32 with VVAE_FP32. All sums are in f32.
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_EXT_shader_8bit_storage : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_control_flow_attributes : require
#if !defined(VVAE_FP32) && !defined(VVAE_BF16)
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_spirv_intrinsics : require
// RoundingModeRTE: conversions to f16 round to the nearest, to even between two.
spirv_execution_mode(capabilities = [4467], 4462, 16);
#endif

const uint MAX_FRAMES = 32;  // frames of one launch

layout(buffer_reference, scalar, buffer_reference_align = 1) buffer Byte { uint8_t value; };
layout(buffer_reference, scalar, buffer_reference_align = 2) buffer Short { uint16_t value; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Word { uint value; };
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer Float { float value; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer Float2 { vec2 value; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer Float4 { vec4 value; };
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer Word2 { uvec2 value; };
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer Word4 { uvec4 value; };
// What a launch reads and does not write. Such loads are faster.
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer ReadOnly4 { uvec4 value; };

/// Rounds to the nearest f16, to even between two. Integers alone: kernels of other types may convert towards zero.
uint half_of(float x) {
    const uint bits = floatBitsToUint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    // Floats from 0.5 to 1 are as far apart as the smallest of f16.
    precise float shifted = uintBitsToFloat(size) + 0.5;
    const uint small = floatBitsToUint(shifted) - 0x3f000000u;
    const uint usual = (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13;
    const uint large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return sign | (size < 0x38800000u ? small : size < 0x477ff000u ? usual : large);
}

float from_half(uint bits) {
    const uint sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size >= 0x7c00u) return uintBitsToFloat(sign | size << 13 | 0x7f800000u);
    if (size < 0x400u) return uintBitsToFloat(sign | floatBitsToUint(float(size) * 5.9604644775390625e-8));
    return uintBitsToFloat(sign | (size << 13) + 0x38000000u);
}

/// Rounds to the nearest bf16, to even between two.
uint bfloat_of(float x) {
    const uint bits = floatBitsToUint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return bits + 0x7fffu + (bits >> 16 & 1u) >> 16;
}

#if defined(VVAE_FP32)
#define ELEMENT_BYTES 4u
float rounded(float x) { return x; }
vec4 load4(uint64_t address) { return Float4(address).value; }
void store4(uint64_t address, vec4 x) { Float4(address).value = x; }
void store2(uint64_t address, vec2 x) { Float2(address).value = x; }
vec2 load2(uint64_t address) { return Float2(address).value; }
#define Pair vec2  // two elements as they are stored
vec2 pack(vec2 x) { return x; }
vec2 unpack(vec2 pair) { return pair; }
void store_pair(uint64_t address, vec2 pair) { Float2(address).value = pair; }
float load1(uint64_t address) { return Float(address).value; }
void store1(uint64_t address, float x) { Float(address).value = x; }
#else
#define ELEMENT_BYTES 2u
#define Pair uint  // two elements as they are stored
#if defined(VVAE_BF16)
float load1(uint64_t address) { return uintBitsToFloat(uint(Short(address).value) << 16); }
void store1(uint64_t address, float x) { Short(address).value = uint16_t(bfloat_of(x)); }
uint pack(vec2 x) { return bfloat_of(x.x) | bfloat_of(x.y) << 16; }
vec2 unpack(uint pair) { return vec2(uintBitsToFloat(pair << 16), uintBitsToFloat(pair & 0xffff0000u)); }
float rounded(float x) { return uintBitsToFloat(bfloat_of(x) << 16); }
#else
float load1(uint64_t address) { return from_half(uint(Short(address).value)); }
void store1(uint64_t address, float x) { Short(address).value = uint16_t(half_of(x)); }
uint pack(vec2 x) { return packFloat2x16(f16vec2(x)); }
vec2 unpack(uint pair) { return unpackHalf2x16(pair); }
float rounded(float x) { return float(float16_t(x)); }
#endif
vec4 load4(uint64_t address) {
    const uvec2 pairs = Word2(address).value;
    return vec4(unpack(pairs.x), unpack(pairs.y));
}
void store4(uint64_t address, vec4 x) { Word2(address).value = uvec2(pack(x.xy), pack(x.zw)); }
void store2(uint64_t address, vec2 x) { Word(address).value = pack(x); }
void store_pair(uint64_t address, uint pair) { Word(address).value = pair; }
vec2 load2(uint64_t address) { return unpack(Word(address).value); }
#endif

/// e^x to 2 ulp, of our own: that of drivers differs. Cephes' polynomial. Infinite above 88.7, 0 below -87.3.
float exponential(float x) {
    precise float n = floor(x * 1.44269504 + 0.5);
    n = clamp(n, -126.0, 128.0);
    precise float r = fma(n, 2.12194440e-4, fma(n, -0.693359375, x));
    precise float p = 1.9875691500e-4;
    p = fma(p, r, 1.3981999507e-3);
    p = fma(p, r, 8.3334519073e-3);
    p = fma(p, r, 4.1665795894e-2);
    p = fma(p, r, 1.6666665459e-1);
    p = fma(p, r, 5.0000001201e-1);
    p = fma(p, r * r, r) + 1.0;
    // In two steps, as 2^128 is no float.
    const int whole = int(n), first = whole / 2;
    const float scaled = p * uintBitsToFloat(uint(first + 127) << 23) * uintBitsToFloat(uint(whole - first + 127) << 23);
    return x < -87.3 ? 0.0 : x > 88.72 ? uintBitsToFloat(0x7f800000u) : x != x ? x : scaled;
}

/// x / (1 + e^-x).
float silu(float x) { return x / (1.0 + exponential(-x)); }

bool is_finite(float x) { return (floatBitsToUint(x) & 0x7f800000u) != 0x7f800000u; }
