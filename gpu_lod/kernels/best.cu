// The highest of many scores in their order, equal ones by their place: a block for each row of scores.
//
// DOUBLE is defined for scores of double precision.
#include "select.cuh"

#define MOST 512  // that are wanted, each of which is compared with all others

#ifdef DOUBLE
typedef double Score;
#else
typedef float Score;
#endif

struct Best {
    const Score* scores;  // [rows, there]
    Score* found;         // [rows, count]
    long long* places;    // [rows, count]
    int there, count;
};

extern "C" __global__ void __launch_bounds__(THREADS) best(const Best p) {
    __shared__ Selecting selecting;
    __shared__ int counts[THREADS];
    __shared__ unsigned long long keys[MOST];
    __shared__ int places[MOST];
    __shared__ int taken;
    int me = (int)threadIdx.x;
    const Score* scores = p.scores + (unsigned long long)blockIdx.x * (unsigned)p.there;
    unsigned long long first = (unsigned long long)blockIdx.x * (unsigned)p.count;
    // The lowest is the best; one zero is like another, and a NaN, whatever its bits, before all numbers.
    auto value = [scores](int i) {
        double score = scores[i];
        return score == score ? -(score + 0.0) : __longlong_as_double((long long)0xffffffffffffffffull);
    };
    unsigned long long last = ~0ull;
    int ties = p.there;
    if (p.count < p.there) {
        Smallest found = smallest_of_block(value, p.there, p.count, selecting);
        last = key_of(found.kth), ties = found.ties;
    }
    if (me == 0) taken = 0;
    int each = (p.there + THREADS - 1) / THREADS, begin = min(me * each, p.there), end = min(begin + each, p.there);
    int before = 0;
    for (int i = begin; i < end; ++i) before += key_of(value(i)) == last;
    before = sum_before_in_block(before, counts);
    for (int i = begin; i < end; ++i) {
        unsigned long long key = key_of(value(i));
        if (key > last || (key == last && before++ >= ties)) continue;
        int slot = atomicAdd(&taken, 1);
        keys[slot] = key, places[slot] = i;
    }
    __syncthreads();
    for (int i = me; i < p.count; i += THREADS) {
        unsigned long long key = keys[i];
        int place = places[i], rank = 0;
        for (int other = 0; other < p.count; ++other)
            rank += keys[other] < key || (keys[other] == key && places[other] < place);
        p.found[first + (unsigned)rank] = scores[place];
        p.places[first + (unsigned)rank] = place;
    }
}
