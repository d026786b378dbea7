// Whole shares of a total, by weight and largest remainder, none above its room: a block for each image.
#include "block.cuh"

struct Shares {
    const double* weight;     // [images, strata], not negative
    const long long* room;    // [images, strata]
    const long long* totals;  // [images]; null: `total` of each
    long long* counts;        // [images, strata]
    double* scratch;          // [images, 2, strata]
    long long total;
    int strata, least;  // least: for each stratum, the heaviest first
};

// How many come before one: higher ones, and equal ones by their place.
__device__ __forceinline__ int rank(const double* values, int count, int one) {
    int before = 0;
    for (int i = 0; i < count; ++i) before += values[i] > values[one] || (values[i] == values[one] && i < one);
    return before;
}

extern "C" __global__ void __launch_bounds__(THREADS) shares(const Shares p) {
    __shared__ double reals[THREADS];
    __shared__ long long wholes[THREADS];
    unsigned long long first = (unsigned long long)blockIdx.x * p.strata;
    const double* weight = p.weight + first;
    const long long* room = p.room + first;
    long long* counts = p.counts + first;
    double *key = p.scratch + 2 * first, *share = key + p.strata;
    long long wanted = p.totals ? p.totals[blockIdx.x] : p.total, mine = 0;
    for (int s = (int)threadIdx.x; s < p.strata; s += THREADS) key[s] = room[s] > 0 ? weight[s] : -1.0;
    __syncthreads();
    for (int s = (int)threadIdx.x; s < p.strata; s += THREADS) {
        long long least = p.least && rank(key, p.strata, s) < wanted ? p.least : 0;
        counts[s] = least < room[s] ? least : room[s];
        mine += counts[s];
    }
    for (int turn = 0; turn < p.strata; ++turn) {  // each fills a stratum, or is the last
        long long rest = wanted - sum_of_block(mine, wholes);
        if (rest <= 0) return;
        double heavy = 0.0;
        for (int s = (int)threadIdx.x; s < p.strata; s += THREADS) {
            share[s] = room[s] > counts[s] ? weight[s] : 0.0;
            heavy += share[s];
        }
        double all = sum_of_block(heavy, reals);
        if (!(all > 0.0)) {  // what weighs nothing shares when all that does is full
            long long open = 0;
            for (int s = (int)threadIdx.x; s < p.strata; s += THREADS) {
                share[s] = room[s] > counts[s] ? 1.0 : 0.0;
                open += room[s] > counts[s];
            }
            all = fmax((double)sum_of_block(open, wholes), 1e-300);
        }
        long long over = 0;
        for (int s = (int)threadIdx.x; s < p.strata; s += THREADS) {
            share[s] = (double)rest * share[s] / all;
            over += share[s] > (double)(room[s] - counts[s]);
        }
        bool full = sum_of_block(over, wholes) > 0;
        // Those that would get more than they have room for are filled first, alone: the rest is shared anew.
        long long given = 0;
        for (int s = (int)threadIdx.x; s < p.strata; s += THREADS) {
            long long left = room[s] - counts[s], part = (long long)floor(share[s]);
            if (part > left) part = left;
            if (full && !(share[s] > (double)left)) part = 0;
            key[s] = left > 0 && part < left ? share[s] - (double)part : -1.0;
            counts[s] += part;
            given += part;
        }
        mine += given;
        long long extra = rest - sum_of_block(given, wholes);  // and every key is there
        if (full) continue;
        for (int s = (int)threadIdx.x; s < p.strata; s += THREADS)
            if (key[s] >= 0.0 && rank(key, p.strata, s) < extra) counts[s] += 1, mine += 1;
    }
}
