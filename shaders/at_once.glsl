// Vectors of words: AT_ONCE elements of one channel, stored at once. AT_ONCE is PER_WORD (words.glsl), or 4, or with PAIRS
// 8: software renderers store a vector in less time than its words.
// STORED   what they are in a buffer
// PACKED(texel, k, c)   channel c of texel[k], texel[k + 1], ..., AT_ONCE of them
#include "pairs.glsl"
#if AT_ONCE == 8 && PER_WORD == 4
#define STORED double
#define WORD_OF(texel, k, c) pack(vec4(texel[k].c, texel[k + 1].c, texel[k + 2].c, texel[k + 3].c))
#define PACKED(texel, k, c) as_words(WORD_OF(texel, k, c), WORD_OF(texel, k + 4, c))
#elif AT_ONCE == 8 && PER_WORD == 2
#define STORED dvec2
#define FOUR_OF(texel, k, c) as_words(pack(vec2(texel[k].c, texel[k + 1].c)), pack(vec2(texel[k + 2].c, texel[k + 3].c)))
#define PACKED(texel, k, c) dvec2(FOUR_OF(texel, k, c), FOUR_OF(texel, k + 4, c))
#elif AT_ONCE == 8
#define STORED dvec4
#define FOUR_OF(texel, k, c) as_four(vec4(texel[k].c, texel[k + 1].c, texel[k + 2].c, texel[k + 3].c))
#define PACKED(texel, k, c) dvec4(FOUR_OF(texel, k, c), FOUR_OF(texel, k + 4, c))
#elif PER_WORD == 4
#define STORED uint
#define PACKED(texel, k, c) pack(vec4(texel[k].c, texel[k + 1].c, texel[k + 2].c, texel[k + 3].c))
#elif PER_WORD == 2
#define PACKED_WORD(texel, k, c) pack(vec2(texel[k].c, texel[k + 1].c))
#if AT_ONCE == 4
#define STORED TWO_WORDS
#define PACKED(texel, k, c) as_words(PACKED_WORD(texel, k, c), PACKED_WORD(texel, k + 2, c))
#else
#define STORED uint
#define PACKED(texel, k, c) PACKED_WORD(texel, k, c)
#endif
#elif AT_ONCE == 4
#define STORED FOUR_FLOATS
#define PACKED(texel, k, c) as_four(vec4(texel[k].c, texel[k + 1].c, texel[k + 2].c, texel[k + 3].c))
#else
#define STORED uint
#define PACKED(texel, k, c) pack(texel[k].c)
#endif
