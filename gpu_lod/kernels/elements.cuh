// Elements of tensors, as they are stored and as floats. One of UINT8 (counts), FLOAT16, BFLOAT16, FLOAT32 is defined.
#pragma once
#include "intrinsics.cuh"

#if defined(UINT8)
typedef unsigned char element;
#define TO_STORED 255.0f  // what a texture's 1 is in the tensor
__device__ __forceinline__ float to_float(element stored) { return (float)stored; }
__device__ __forceinline__ element to_element(float value) {
    return (element)(int)fminf(fmaxf(rintf(value), 0.0f), 255.0f);  // NaN is 0
}

#elif defined(FLOAT16)
typedef unsigned short element;
#define TO_STORED 1.0f
__device__ __forceinline__ float to_float(element stored) { return half_to_float(stored); }
__device__ __forceinline__ element to_element(float value) { return float_to_half(value); }

#elif defined(BFLOAT16)
typedef unsigned short element;
#define TO_STORED 1.0f
__device__ __forceinline__ float to_float(element stored) { return __uint_as_float((unsigned)stored << 16); }
__device__ __forceinline__ element to_element(float value) {
#if __CUDA_ARCH__ >= 800  // knows how
    element bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return (element)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to the nearest, ties to even
#endif
}

#elif defined(FLOAT32)
typedef float element;
#define TO_STORED 1.0f
__device__ __forceinline__ float to_float(element stored) { return stored; }
__device__ __forceinline__ element to_element(float value) { return value; }
#endif

// Neighbours of a row that one instruction loads or stores.
struct alignas(2 * sizeof(element)) Two { element at[2]; };
struct alignas(4 * sizeof(element)) Four { element at[4]; };
