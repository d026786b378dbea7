// Patches given to bands, the best pairs first, none twice and to no band more than its count: a block for each image.
#include "block.cuh"

#define MOST_BANDS 8

struct Served {
    const long long* order;   // [images, bands * patches], pairs from the best on: band * patches + patch
    const long long* counts;  // [images, bands]
    int* rank;                // [images, bands * patches], scratch: of each pair in that order
    unsigned char* taken;     // [images, patches]
    int bands, patches;
};

// Whether a pair is given, if bands are full from the ranks on that are known: a patch goes to the first of its pairs whose
// band was not full yet.
__device__ __forceinline__ bool given_away(const Served& p, const int* rank, const int* full, int band, int patch) {
    int mine = rank[band * p.patches + patch];
    bool given = mine <= full[band];
    for (int other = 0; other < p.bands; ++other) {
        int before = rank[other * p.patches + patch];
        if (before < mine && before <= full[other]) given = false;
    }
    return given;
}

extern "C" __global__ void __launch_bounds__(THREADS) served(const Served p) {
    __shared__ int got[MOST_BANDS * THREADS];  // by each band, of each thread's pairs
    __shared__ int full[MOST_BANDS];           // the rank of the pair that fills a band, if that is known
    __shared__ int found[MOST_BANDS];
    int pairs = p.bands * p.patches, me = (int)threadIdx.x;
    unsigned long long first = (unsigned long long)blockIdx.x * pairs;
    const long long* order = p.order + first;
    const long long* counts = p.counts + (unsigned long long)blockIdx.x * p.bands;
    int* rank = p.rank + first;
    for (int i = me; i < pairs; i += THREADS) rank[order[i]] = i;
    if (me < p.bands) full[me] = counts[me] > 0 ? pairs : -1;
    __syncthreads();
    int piece = (pairs + THREADS - 1) / THREADS;
    // Of the bands that would be filled, the first one is, whatever becomes of the others.
    for (int turn = 0; turn < p.bands; ++turn) {
        for (int band = 0; band < p.bands; ++band) got[band * THREADS + me] = 0;
        for (int i = me * piece; i < (me + 1) * piece && i < pairs; ++i) {
            int band = (int)order[i] / p.patches, patch = (int)order[i] - band * p.patches;
            got[band * THREADS + me] += given_away(p, rank, full, band, patch);
        }
        __syncthreads();
        if (me < p.bands) {
            found[me] = pairs;
            long long left = counts[me];
            int who = 0;
            for (; who < THREADS && got[me * THREADS + who] < left; ++who) left -= got[me * THREADS + who];
            for (int i = who * piece; full[me] == pairs && who < THREADS && i < pairs && found[me] == pairs; ++i) {
                int band = (int)order[i] / p.patches, patch = (int)order[i] - band * p.patches;
                if (band == me && given_away(p, rank, full, band, patch) && --left == 0) found[me] = i;
            }
        }
        __syncthreads();
        int next = pairs;
        for (int band = 0; band < p.bands; ++band) next = found[band] < next ? found[band] : next;
        if (next == pairs) break;
        if (me < p.bands && found[me] == next) full[me] = next;
        __syncthreads();
    }
    for (int patch = me; patch < p.patches; patch += THREADS) {
        bool any = false;
        for (int band = 0; band < p.bands; ++band) any = any || given_away(p, rank, full, band, patch);
        p.taken[(unsigned long long)blockIdx.x * p.patches + patch] = any;
    }
}
