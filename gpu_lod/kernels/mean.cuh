// Hooks of the reduction: the exact area average, carried in fp32 and rounded where a level is stored.
#pragma once
#include "elements.cuh"

typedef float Value;
__device__ __forceinline__ Value load(element stored) { return to_float(stored); }
#ifdef UINT8  // between 0 and 255: a sum with 2^23 rounds, to the nearest, ties to even, and ends in the count
__device__ __forceinline__ element store(Value value) { return (element)__float_as_uint(value + 8388608.0f); }
#else
__device__ __forceinline__ element store(Value value) { return to_element(value); }
#endif
__device__ __forceinline__ Value two(Value a, Value b) { return 0.5f * a + 0.5f * b; }

// Output i of an odd side n = 2 m + 1: the polyphase box filter of Guthe and Heckbert, weights (m - i, m, i + 1) / n.
// The middle one is what the others leave of 1, so that a constant stays one.
struct Shares {
    float first, middle, last;
};
__device__ __forceinline__ Shares shares(int i, int n, float part) {  // part: 1 / n
    Shares s;
    s.first = (float)(n / 2 - i) * part;
    s.last = (float)(i + 1) * part;
    s.middle = 1.0f - s.first - s.last;
    return s;
}
__device__ __forceinline__ Value three(Value a, Value b, Value c, const Shares& s) {
    return s.first * a + s.middle * b + s.last * c;
}

#ifndef FLOAT32
#define KEEP_WIDE  // levels that later levels are made of are kept unrounded too
#endif
