// Vectors of 32 bits in buffers: TWO_FLOATS, FOUR_FLOATS, TWO_WORDS.
// PAIRS   as doubles: some CPUs load and store an element of 64 bits in the time of one of 32, others take longer
#ifdef PAIRS
#define TWO_FLOATS double
#define FOUR_FLOATS dvec2
#define TWO_WORDS double
vec2 two_of(double bits) { return uintBitsToFloat(unpackDouble2x32(bits)); }
vec4 four_of(dvec2 bits) { return vec4(two_of(bits.x), two_of(bits.y)); }
uvec2 words_of(double bits) { return unpackDouble2x32(bits); }
double as_words(uint a, uint b) { return packDouble2x32(uvec2(a, b)); }
double as_two(float a, float b) { return packDouble2x32(floatBitsToUint(vec2(a, b))); }
dvec2 as_four(vec4 v) { return dvec2(as_two(v.x, v.y), as_two(v.z, v.w)); }
#else
#define TWO_FLOATS vec2
#define FOUR_FLOATS vec4
#define TWO_WORDS uvec2
#define two_of(v) (v)
#define four_of(v) (v)
#define words_of(v) (v)
#define as_words(a, b) uvec2(a, b)
#define as_two(a, b) vec2(a, b)
#define as_four(v) (v)
#endif
