// Elements of planar tensors in 32-bit words. No 8- or 16-bit storage is needed: a word holds PER_WORD elements, one
// invocation writes whole words, and no word is written by two invocations.
// PER_WORD: 1 = fp32, 2 = fp16 (bfloat16 with BFLOAT16, for writing), 4 = uint8 (counts, 0 to 255).

#if PER_WORD == 1
#define ELEMENT(buffer_, index_) (buffer_[index_])
float to_float(uint bits) { return uintBitsToFloat(bits); }
#define VALUES_OF(a) a[0]
uint pack(float v) { return floatBitsToUint(v); }
#elif PER_WORD == 2
#define ELEMENT(buffer_, index_) ((buffer_[(index_) >> 1] >> (((index_) & 1u) * 16u)) & 0xffffu)
float to_float(uint bits) { return unpackHalf2x16(bits).x; }
#ifdef BFLOAT16
uint half_bits(float v) {
    uint bits = floatBitsToUint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even, as torch rounds
}
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
#endif
#define VALUES_OF(a) vec2(a[0], a[1])
uint pack(vec2 v) { return half_bits(v.x) | (half_bits(v.y) << 16); }
#else
#define ELEMENT(buffer_, index_) ((buffer_[(index_) >> 2] >> (((index_) & 3u) * 8u)) & 0xffu)
float to_float(uint bits) { return float(bits); }
#define VALUES_OF(a) vec4(a[0], a[1], a[2], a[3])
uint pack(vec4 v) {
    uvec4 counts = uvec4(clamp(roundEven(v), 0.0, 255.0));
    return counts.x | (counts.y << 8) | (counts.z << 16) | (counts.w << 24);
}
#endif
