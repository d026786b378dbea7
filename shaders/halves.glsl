// fp32 to fp16 and back, or with BFLOAT16 to bfloat16.

#ifdef BFLOAT16
uint half_bits(float v) {
    uint bits = floatBitsToUint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even, as torch rounds
}
float from_half_bits(uint bits) { return uintBitsToFloat(bits << 16); }
#else
uint half_bits(float v) {
    // packHalf2x16 may truncate; torch rounds to nearest, ties to even.
    uint bits = floatBitsToUint(v);
    uint sign = (bits >> 16) & 0x8000u;
    uint size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e00u;
    if (size >= 0x477ff000u) return sign | 0x7c00u;
    if (size < 0x38800000u) {  // subnormal: let the sum with 0.5 do the rounding
        return sign | (floatBitsToUint(uintBitsToFloat(size) + 0.5) - 0x3f000000u);
    }
    return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13);
}
float from_half_bits(uint bits) { return unpackHalf2x16(bits).x; }
#endif

uint pack_halves(vec2 v) { return half_bits(v.x) | (half_bits(v.y) << 16); }
