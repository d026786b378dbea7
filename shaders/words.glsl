// Elements of planar tensors in 32-bit words. No 8- or 16-bit storage is needed: a word holds PER_WORD elements, one
// invocation writes whole words, and no word is written by two invocations.
// FETCHED: what is read is a buffer texture, an element a texel, which software renderers load in half the time. TEXELS_OF
// is its type, and FETCH gives an element of it; FETCH_WIDE one of a texture that is fp32 whatever PER_WORD says.
// PER_WORD: 1 = fp32, 2 = fp16, or bfloat16 with BFLOAT16 (what is read, with FROM_BFLOAT16), 4 = uint8 (counts, 0 to 255).
#include "halves.glsl"

#if PER_WORD == 1
#define ELEMENT(buffer_, index_) (buffer_[index_])
float to_float(uint bits) { return uintBitsToFloat(bits); }
#define VALUES_OF(a) a[0]
uint pack(float v) { return floatBitsToUint(v); }
#elif PER_WORD == 2
#define ELEMENT(buffer_, index_) ((buffer_[(index_) >> 1] >> (((index_) & 1u) * 16u)) & 0xffffu)
#ifdef FROM_BFLOAT16
float to_float(uint bits) { return uintBitsToFloat(bits << 16); }
#else
float to_float(uint bits) { return from_half_bits(bits); }
#endif
#define VALUES_OF(a) vec2(a[0], a[1])
uint pack(vec2 v) { return pack_halves(v); }
#else
#define ELEMENT(buffer_, index_) ((buffer_[(index_) >> 2] >> (((index_) & 3u) * 8u)) & 0xffu)
float to_float(uint bits) { return float(bits); }
#define VALUES_OF(a) vec4(a[0], a[1], a[2], a[3])
uint pack(vec4 v) {
    uvec4 counts = uvec4(clamp(roundEven(v), 0.0, 255.0));
    return counts.x | (counts.y << 8) | (counts.z << 16) | (counts.w << 24);
}
#endif

#ifdef FETCHED
#define FETCH_WIDE(texels_, index_) texelFetch(texels_, int(index_)).x
#if PER_WORD == 4
#define TEXELS_OF usamplerBuffer
#define FETCH(texels_, index_) float(texelFetch(texels_, int(index_)).x)
#elif PER_WORD == 2 && (defined(BFLOAT16) || defined(FROM_BFLOAT16))
#define TEXELS_OF usamplerBuffer
#define FETCH(texels_, index_) to_float(texelFetch(texels_, int(index_)).x)
#else
#define TEXELS_OF samplerBuffer
#define FETCH(texels_, index_) FETCH_WIDE(texels_, index_)
#endif
#endif
