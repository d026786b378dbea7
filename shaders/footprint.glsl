// Reduction by mean, max or min, whatever the texels are loaded from. They are VALUE: element bits once loaded, carried
// between levels unrounded.
// PER_WORD as in words.glsl, which it needs; REDUCE_MEAN, REDUCE_MAX or REDUCE_MIN.
#ifdef REDUCE_MEAN
#include "polyphase.glsl"
#define VALUE float
#define NOTHING 0.0
#define CARRIED_BITS(value_) floatBitsToUint(value_)
#define FROM_CARRIED(bits_) uintBitsToFloat(bits_)
#else
#include "order.glsl"
#define VALUE uint
#define NOTHING IDENTITY_KEY
#define CARRIED_BITS(value_) (value_)
#define FROM_CARRIED(bits_) (bits_)
#endif

// Footprints of n texels along a side: 2 where n is even, 3 where it is odd, 1 where it is 1 already.
ivec2 taps_of(ivec2 n) { return ivec2(n.x == 1 ? 1 : 2 + (n.x & 1), n.y == 1 ? 1 : 2 + (n.y & 1)); }

// 2 x 2 texels, row by row. Halves are exact, so whoever contracts sums to fused ones changes nothing.
VALUE quad(VALUE a, VALUE b, VALUE c, VALUE d) {
#ifdef REDUCE_MEAN
    return 0.5 * (0.5 * a + 0.5 * b) + 0.5 * (0.5 * c + 0.5 * d);
#else
    return REDUCE(REDUCE(a, b), REDUCE(c, d));
#endif
}

// Up to 3 x 3 texels, NOTHING where the footprint ends before, of texel `at` of a level of this size. Precise, so that every
// program that a driver compiles it into gives the same bits.
VALUE box(VALUE v[9], ivec2 at, ivec2 size, ivec2 taps) {
#ifdef REDUCE_MEAN
    precise vec3 wx = weights(at.x, size.x, taps.x), wy = weights(at.y, size.y, taps.y);
    precise float sum = 0.0;
    for (int y = 0; y < 3; ++y) sum += wy[y] * (wx[0] * v[3 * y] + wx[1] * v[3 * y + 1] + wx[2] * v[3 * y + 2]);
    return sum;
#else
    uint best = v[0];
    for (int k = 1; k < 9; ++k) best = REDUCE(best, v[k]);
    return best;
#endif
}

// PER_WORD texels as the word that is stored.
uint stored_word(VALUE v[PER_WORD]) {
#ifdef REDUCE_MEAN
    return pack(VALUES_OF(v));
#else
    uint bits = 0u;
    for (int k = 0; k < PER_WORD; ++k) bits |= from_key(v[k]) << (uint(k) * (32u / uint(PER_WORD)) % 32u);
    return bits;
#endif
}
