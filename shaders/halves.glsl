// fp32 to fp16 and back, or with BFLOAT16 to bfloat16.

#ifdef BFLOAT16
uint half_bits(float v) {
    uint bits = floatBitsToUint(v);
    uint nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // ties to even, as torch rounds
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest;
}
float from_half_bits(uint bits) { return uintBitsToFloat(bits << 16); }
#else
uint half_bits(float v) {
    // packHalf2x16 may truncate; torch rounds to nearest, ties to even.
    uint bits = floatBitsToUint(v);
    uint size = bits & 0x7fffffffu;
    // Choices and no branches, which software renderers take both.
    uint nearest = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    uint subnormal = floatBitsToUint(uintBitsToFloat(size) + 0.5) - 0x3f000000u;  // the sum does the rounding
    uint half_ = size < 0x38800000u ? subnormal : nearest;
    half_ = size < 0x477ff000u ? half_ : size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return half_ | ((bits >> 16) & 0x8000u);
}
float from_half_bits(uint bits) { return unpackHalf2x16(bits).x; }
#endif

uint pack_halves(vec2 v) { return half_bits(v.x) | (half_bits(v.y) << 16); }
