// Hooks of the reduction: max and min without floating point. Keys are unsigned integers in the order of the values, so
// that subnormals survive; the rule for NaN is torch.amax's: a footprint that holds one is NaN.
// REDUCE_MAX or REDUCE_MIN is defined.
#pragma once
#include "elements.cuh"

typedef unsigned Value;

#ifdef REDUCE_MAX
__device__ __forceinline__ Value two(Value a, Value b) { return a > b ? a : b; }
#else
__device__ __forceinline__ Value two(Value a, Value b) { return a < b ? a : b; }
#endif
struct Shares {};
__device__ __forceinline__ Shares shares(int, int, float) { return Shares(); }
__device__ __forceinline__ Value three(Value a, Value b, Value c, const Shares&) { return two(two(a, b), c); }

#if defined(UINT8)
__device__ __forceinline__ Value load(element stored) { return stored; }
__device__ __forceinline__ element store(Value key) { return (element)key; }
#else

#if defined(FLOAT32)
#define SIGN_BIT 0x80000000u
#define ALL_BITS 0xffffffffu
#define INFINITY_BITS 0x7f800000u
__device__ __forceinline__ unsigned bits_of(element stored) { return __float_as_uint(stored); }
__device__ __forceinline__ element element_of(unsigned bits) { return __uint_as_float(bits); }
#else
#define SIGN_BIT 0x8000u
#define ALL_BITS 0xffffu
#ifdef FLOAT16
#define INFINITY_BITS 0x7c00u
#else
#define INFINITY_BITS 0x7f80u
#endif
__device__ __forceinline__ unsigned bits_of(element stored) { return stored; }
__device__ __forceinline__ element element_of(unsigned bits) { return (element)bits; }
#endif

// NaN lies beyond the end that wins.
#ifdef REDUCE_MAX
#define NAN_KEY ALL_BITS
#else
#define NAN_KEY 0u
#endif

__device__ __forceinline__ Value load(element stored) {
    unsigned bits = bits_of(stored);
    if ((bits & ~SIGN_BIT) > INFINITY_BITS) return NAN_KEY;
    return bits & SIGN_BIT ? ALL_BITS ^ bits : bits | SIGN_BIT;
}
__device__ __forceinline__ element store(Value key) {
    return element_of(key & SIGN_BIT ? key ^ SIGN_BIT : ALL_BITS ^ key);
}
#endif
