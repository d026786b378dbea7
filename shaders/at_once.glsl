// Vectors of words: AT_ONCE elements of one channel, stored at once. AT_ONCE is PER_WORD (words.glsl), or 4: software
// renderers store a vector in less time than its words, and one of 64 bits in the time of one of 32.
// STORED   what they are in a buffer
// PACKED(texel, k, c)   channel c of texel[k], texel[k + 1], ..., AT_ONCE of them
#define PAIR_OF(a, b) packDouble2x32(uvec2(a, b))
#if PER_WORD == 4
#define STORED uint
#define PACKED(texel, k, c) pack(vec4(texel[k].c, texel[k + 1].c, texel[k + 2].c, texel[k + 3].c))
#elif PER_WORD == 2
#define PACKED_WORD(texel, k, c) pack(vec2(texel[k].c, texel[k + 1].c))
#if AT_ONCE == 4
#define STORED double
#define PACKED(texel, k, c) PAIR_OF(PACKED_WORD(texel, k, c), PACKED_WORD(texel, k + 2, c))
#else
#define STORED uint
#define PACKED(texel, k, c) PACKED_WORD(texel, k, c)
#endif
#elif AT_ONCE == 4
#define STORED dvec2
#define PAIR_AT(texel, k, c) PAIR_OF(pack(texel[k].c), pack(texel[k + 1].c))
#define PACKED(texel, k, c) dvec2(PAIR_AT(texel, k, c), PAIR_AT(texel, k + 2, c))
#else
#define STORED uint
#define PACKED(texel, k, c) pack(texel[k].c)
#endif
