// Max and min without floating point: keys are unsigned integers in the order of the values, so that subnormals survive
// and NaN has a defined place on every device. The rule is torch.amax's: a footprint that holds a NaN is NaN.
// PER_WORD, BFLOAT16 as in words.glsl; REDUCE_MAX or REDUCE_MIN.

#if PER_WORD == 4
uint to_key(uint bits) { return bits; }
uint from_key(uint key) { return key; }
#ifdef REDUCE_MAX
#define IDENTITY_KEY 0u
#else
#define IDENTITY_KEY 255u
#endif

#else

#if PER_WORD == 1
#define SIGN_BIT 0x80000000u
#define ALL_BITS 0xffffffffu
#define INFINITY_BITS 0x7f800000u
#else
#define SIGN_BIT 0x8000u
#define ALL_BITS 0xffffu
#ifdef BFLOAT16
#define INFINITY_BITS 0x7f80u
#else
#define INFINITY_BITS 0x7c00u
#endif
#endif

// The identity is -inf for max and +inf for min; NaN lies beyond the other end, so that it wins.
#ifdef REDUCE_MAX
#define IDENTITY_KEY (ALL_BITS ^ (INFINITY_BITS | SIGN_BIT))
#define NAN_KEY ALL_BITS
#else
#define IDENTITY_KEY (INFINITY_BITS | SIGN_BIT)
#define NAN_KEY 0u
#endif

uint to_key(uint bits) {
    if ((bits & ~SIGN_BIT) > INFINITY_BITS) return NAN_KEY;
    return (bits & SIGN_BIT) != 0u ? ALL_BITS ^ bits : bits | SIGN_BIT;
}
uint from_key(uint key) { return (key & SIGN_BIT) != 0u ? key ^ SIGN_BIT : ALL_BITS ^ key; }
#endif

#ifdef REDUCE_MAX
#define REDUCE(a, b) max(a, b)
#else
#define REDUCE(a, b) min(a, b)
#endif
