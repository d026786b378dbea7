// How many values of its stratum come before each value, higher ones and equal ones by their place: a block for THREADS
// values of an image.
#include "block.cuh"

#define MOST 4096  // values, and strata, for which a block has room

struct Ranks {
    const float* values;      // [images, cells]
    const long long* strata;  // [images, cells]
    long long* ranks;         // [images, cells]
    int cells, count;         // count: of strata
    int tiles;                // of THREADS values, in an image
};

// Bits in the order of the numbers, the highest first; one zero is like another, and NaN before all numbers.
__device__ __forceinline__ unsigned key_of(float value) {
    if (value != value) return 0u;
    unsigned bits = __float_as_uint(value + 0.0f);
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

extern "C" __global__ void __launch_bounds__(THREADS) ranks(const Ranks p) {
    __shared__ unsigned keys[MOST], ends[MOST];  // ends: of strata among the members
    __shared__ unsigned short members[MOST];     // values' places, stratum by stratum, of each in any order
    __shared__ unsigned counts[THREADS];
    int me = (int)threadIdx.x;
    unsigned image = blockIdx.x / (unsigned)p.tiles;
    unsigned long long first = (unsigned long long)image * (unsigned)p.cells;
    const float* values = p.values + first;
    const long long* strata = p.strata + first;
    for (int i = me; i < p.count; i += THREADS) ends[i] = 0u;
    __syncthreads();
    for (int i = me; i < p.cells; i += THREADS) {
        keys[i] = key_of(values[i]);
        atomicAdd(&ends[strata[i]], 1u);
    }
    __syncthreads();
    int each = (p.count + THREADS - 1) / THREADS, from = min(me * each, p.count), to = min(from + each, p.count);
    unsigned start = 0u;
    for (int i = from; i < to; ++i) start += ends[i];
    start = sum_before_in_block(start, counts);
    for (int i = from; i < to; ++i) {
        unsigned many = ends[i];
        ends[i] = start;  // as long as no member is there
        start += many;
    }
    __syncthreads();
    for (int i = me; i < p.cells; i += THREADS) members[atomicAdd(&ends[strata[i]], 1u)] = (unsigned short)i;
    __syncthreads();
    int mine = (int)(blockIdx.x - image * (unsigned)p.tiles) * THREADS + me;
    if (mine >= p.cells) return;
    long long stratum = strata[mine];
    unsigned key = keys[mine], end = ends[stratum];
    int rank = 0;
    for (unsigned i = stratum > 0 ? ends[stratum - 1] : 0u; i < end; ++i) {
        int other = members[i];
        rank += keys[other] < key || (keys[other] == key && other < mine);
    }
    p.ranks[first + (unsigned)mine] = rank;
}
