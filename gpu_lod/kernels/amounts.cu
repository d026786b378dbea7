// Relevance as numbers that can be summed, and as finite ones: a block for each map.
#include "block.cuh"

struct Amounts {
    const float* relevance;  // [maps, cells]
    float* amounts;          // [maps, cells]: not negative, and not all 0
    float* finite;           // [maps, cells]
    int cells;
    int highest, lowest;  // exponents between which a map's largest stays as it is
};

extern "C" __global__ void __launch_bounds__(THREADS) amounts(const Amounts p) {
    __shared__ float shared[THREADS];
    unsigned long long first = (unsigned long long)blockIdx.x * p.cells;
    const float* relevance = p.relevance + first;
    const float infinity = __uint_as_float(0x7f800000u);
    float largest = 0.0f;
    for (int i = (int)threadIdx.x; i < p.cells; i += THREADS) {
        float size = fabsf(relevance[i]);
        if (size < infinity) largest = fmaxf(largest, size);
    }
    largest = highest_of_block(largest, shared);
    int exponent = 0, shift = 0;
    frexpf(largest, &exponent);
    if (exponent > p.highest) shift = p.highest - exponent;
    if (exponent < p.lowest && largest > 0.0f) shift = -exponent < 120 ? -exponent : 120;
    float factor = ldexpf(1.0f, shift), limit = ldexpf(1.0f, p.highest + 4), high = -infinity, low = -infinity;
    for (int i = (int)threadIdx.x; i < p.cells; i += THREADS) {
        if (relevance[i] == -infinity) continue;  // a number here all the same, the least there is
        float value = fminf(fmaxf(relevance[i] * factor, -limit), limit);
        high = fmaxf(high, value), low = fmaxf(low, -value);
    }
    high = highest_of_block(high, shared);
    float least = -highest_of_block(low, shared), from = fminf(least, 0.0f);
    bool alive = high - from > 0.0f;
    for (int i = (int)threadIdx.x; i < p.cells; i += THREADS) {
        bool none = relevance[i] == -infinity;
        float value = fminf(fmaxf(relevance[i] * factor, -limit), limit);
        p.amounts[first + i] = !alive ? 1.0f : none ? 0.0f : value - from;
        p.finite[first + i] = !none ? value : least < infinity ? least : 0.0f;
    }
}
