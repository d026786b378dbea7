// What the threads of a block make of their values together; each of them gets it.
#pragma once
#include "intrinsics.cuh"

#ifndef THREADS
#define THREADS 256
#endif

// NaN, once met, stays.
template <class T> __device__ __forceinline__ T higher(T a, T b) { return b > a || b != b ? b : a; }

template <class T> __device__ __forceinline__ T sum_of_block(T value, T* shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (unsigned step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) shared[threadIdx.x] += shared[threadIdx.x + step];
        __syncthreads();
    }
    T total = shared[0];
    __syncthreads();
    return total;
}

template <class T> __device__ __forceinline__ T highest_of_block(T value, T* shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (unsigned step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) shared[threadIdx.x] = higher(shared[threadIdx.x], shared[threadIdx.x + step]);
        __syncthreads();
    }
    T found = shared[0];
    __syncthreads();
    return found;
}

// Of the threads before.
template <class T> __device__ __forceinline__ T sum_before_in_block(T value, T* shared) {
    shared[threadIdx.x] = value;
    __syncthreads();
    for (unsigned step = 1; step < THREADS; step *= 2) {
        T before = threadIdx.x < step ? T(0) : shared[threadIdx.x - step];
        __syncthreads();
        shared[threadIdx.x] += before;
        __syncthreads();
    }
    return shared[threadIdx.x] - value;
}
