// The k-th smallest of many numbers, and the one after it: a block finds them byte by byte, the highest first.
#pragma once
#include "block.cuh"

#define BINS 256  // a byte's values, as many as there are threads
#define BIN_GROUPS 16
#define GROUP_BINS (BINS / BIN_GROUPS)

// What the threads share meanwhile.
struct Selecting {
    unsigned bins[BINS], groups[BIN_GROUPS];
    unsigned long long kth, keys[THREADS];
};

struct Smallest {
    double kth, next;
    int ties;  // numbers equal to the k-th among the first k; whoever takes them chooses which
};

// Bits in the order of the numbers: -0 comes before 0, and NaN after infinity.
__device__ __forceinline__ unsigned long long key_of(double value) {
    unsigned long long bits = (unsigned long long)__double_as_longlong(value);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ double number_of(unsigned long long key) {
    return __longlong_as_double((long long)(key >> 63 ? key ^ 1ull << 63 : ~key));
}

// value(i) is asked for again and again, each i by the same thread: i % THREADS. 0 < k < count.
template <class Value>
__device__ __forceinline__ Smallest smallest_of_block(const Value& value, int count, int k, Selecting& shared) {
    unsigned me = threadIdx.x, rank = (unsigned)k - 1u;
    unsigned alike = (unsigned)count;  // of those that begin as the k-th does
    unsigned long long start = 0ull;
    int shift = 64;
    while (alike > 1u && shift > 0) {
        shift -= 8;
        shared.bins[me] = 0u;
        __syncthreads();
        for (int i = (int)me; i < count; i += THREADS) {
            unsigned long long key = key_of(value(i)) >> shift;
            if (key >> 8 == start) atomicAdd(&shared.bins[key & 255ull], 1u);
        }
        __syncthreads();
        if (me < BIN_GROUPS) {
            unsigned sum = 0u;
            for (unsigned i = 0u; i < GROUP_BINS; ++i) sum += shared.bins[me * GROUP_BINS + i];
            shared.groups[me] = sum;
        }
        __syncthreads();
        unsigned group = 0u;
        for (; group < BIN_GROUPS - 1 && shared.groups[group] <= rank; ++group) rank -= shared.groups[group];
        unsigned bin = group * GROUP_BINS;
        for (; bin < BINS - 1 && shared.bins[bin] <= rank; ++bin) rank -= shared.bins[bin];
        alike = shared.bins[bin];
        start = start << 8 | bin;
        __syncthreads();
    }
    // It is the only one that begins so, or all that do are equal.
    unsigned long long above = ~0ull;
    for (int i = (int)me; i < count; i += THREADS) {
        unsigned long long key = key_of(value(i));
        if (key >> shift == start) shared.kth = key;
        if (key >> shift > start && key < above) above = key;
    }
    above = ~highest_of_block(~above, shared.keys);
    Smallest found;
    found.kth = number_of(shared.kth);
    found.next = rank + 1u < alike ? found.kth : number_of(above);
    found.ties = (int)rank + 1;
    return found;
}
