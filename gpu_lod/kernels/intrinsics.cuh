// What CUDA C++ has no name for without its headers, which NVRTC does not need. Everything else is built in.
#pragma once

// Threads that a multiprocessor has room for.
#if __CUDA_ARCH__ == 750
#define RESIDENT 1024
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100
#define RESIDENT 1536
#else
#define RESIDENT 2048
#endif
// For __launch_bounds__: so many blocks, or all that there is room for. Of more the compiler takes no notice at all.
#define RESIDENT_BLOCKS(blocks) ((blocks) * THREADS > RESIDENT ? RESIDENT / THREADS : (blocks))

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// To the nearest, ties to even, as torch rounds.
__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// One instruction each, where their like in CUDA C++ take dozens. Errors: 2^-23 of a root; 2^-22 of a logarithm, or as
// much of its size where that is above 1. What is subnormal counts as 0.
__device__ __forceinline__ float quick_root(float value) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(value));
    return root;
}
__device__ __forceinline__ float quick_log2(float value) {
    float log;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log) : "f"(value));
    return log;
}
