// Patches given to bands, the best pairs first, none twice and to no band more than its count: a block for each image.
#include "block.cuh"

#define MOST_BANDS 8
#define EACH 8                    // pairs of a window that a thread counts
#define WINDOW (EACH * THREADS)
#define GROUPS 16                 // of threads, whose counts are summed before a band's thread goes through them
#define MEMBERS (THREADS / GROUPS)

struct Served {
    const long long* order;   // [images, bands * patches], pairs from the best on: band * patches + patch
    const long long* counts;  // [images, bands]
    int* rank;                // [images, bands * patches], scratch: of each pair in that order, as far as that is read
    unsigned char* taken;     // [images, patches]
    int bands, patches;
};

// Whether a pair is given, if bands are full from the ranks on that are known: a patch goes to the first of its pairs
// whose band was not full yet.
__device__ __forceinline__ bool given_away(const Served& p, const int* rank, const int* full, int band, int patch) {
    int mine = rank[band * p.patches + patch];
    bool given = mine <= full[band];
    for (int other = 0; other < p.bands; ++other) {
        int before = rank[other * p.patches + patch];
        if (before < mine && before <= full[other]) given = false;
    }
    return given;
}

// Windows of pairs one after the other, until all bands are full: few tokens are given to the first of many pairs.
extern "C" __global__ void __launch_bounds__(THREADS) served(const Served p) {
    __shared__ int window[WINDOW];
    __shared__ int got[MOST_BANDS * THREADS];  // by each band, of each thread's pairs in the window
    __shared__ int sums[MOST_BANDS * GROUPS];
    __shared__ int full[MOST_BANDS];           // the rank of the pair that fills a band, if that is known
    __shared__ int found[MOST_BANDS];
    int pairs = p.bands * p.patches, me = (int)threadIdx.x;
    unsigned long long first = (unsigned long long)blockIdx.x * pairs;
    const long long* order = p.order + first;
    int* rank = p.rank + first;
    for (int i = me; i < pairs; i += THREADS) rank[i] = pairs;  // behind all that is read
    long long left = me < p.bands ? p.counts[(unsigned long long)blockIdx.x * p.bands + me] : 0;
    if (me < p.bands) full[me] = left > 0 ? pairs : -1;
    __syncthreads();
    for (int start = 0; start < pairs; start += WINDOW) {
        bool open = false;
        for (int band = 0; band < p.bands; ++band) open = open || full[band] == pairs;
        if (!open) break;
        int size = min(pairs - start, WINDOW);
        for (int i = me; i < size; i += THREADS) {
            window[i] = (int)order[start + i];
            rank[window[i]] = start + i;
        }
        __syncthreads();
        // Of the bands that would be filled, the first one is, whatever becomes of the others.
        while (true) {
            for (int band = 0; band < p.bands; ++band) got[band * THREADS + me] = 0;
            for (int i = me * EACH; i < (me + 1) * EACH && i < size; ++i) {
                int band = window[i] / p.patches, patch = window[i] - band * p.patches;
                got[band * THREADS + me] += given_away(p, rank, full, band, patch);
            }
            __syncthreads();
            if (me < p.bands * GROUPS) {
                sums[me] = 0;
                for (int i = 0; i < MEMBERS; ++i) sums[me] += got[me * MEMBERS + i];
            }
            __syncthreads();
            long long rest = left;
            if (me < p.bands) {
                found[me] = pairs;
                int group = 0;
                for (; group < GROUPS && sums[me * GROUPS + group] < rest; ++group) rest -= sums[me * GROUPS + group];
                if (full[me] == pairs && group < GROUPS) {
                    int who = group * MEMBERS;
                    for (; got[me * THREADS + who] < rest; ++who) rest -= got[me * THREADS + who];
                    for (int i = who * EACH; found[me] == pairs; ++i) {
                        int band = window[i] / p.patches, patch = window[i] - band * p.patches;
                        if (band == me && given_away(p, rank, full, band, patch) && --rest == 0) found[me] = start + i;
                    }
                }
            }
            __syncthreads();
            int next = pairs;
            for (int band = 0; band < p.bands; ++band) next = found[band] < next ? found[band] : next;
            if (next == pairs) {
                left = rest;
                break;
            }
            if (me < p.bands && found[me] == next) full[me] = next;
            __syncthreads();
        }
    }
    for (int patch = me; patch < p.patches; patch += THREADS) {
        bool any = false;
        for (int band = 0; band < p.bands; ++band) any = any || given_away(p, rank, full, band, patch);
        p.taken[(unsigned long long)blockIdx.x * p.patches + patch] = any;
    }
}
