// Sites about a fixation, as dense as the visual cortex magnifies, and scores of them: a block for each image.
#include "spiral.cuh"

#define TURN 6.283185307179586

struct Cortical {
    Spiral spiral;
    const double* e0s;       // [images]; null: e0 of each
    const float* relevance;  // [images, rows, columns]; null: no scores
    float* sites;            // [images, budget, 3]: x, y, level
    float* scores;           // [images, budget]: relevance times magnification
    double e0;
    int height, width, patch;  // in pixels
    int rows, columns;
};

__device__ __forceinline__ double in_picture(double part) { return fmin(fmax(part, 0.0), 1.0); }

// Of so many that are `patch` of a side's pixels long; the last may reach over it.
__device__ __forceinline__ int cell(double part, int side, int patch, int cells) {
    return min(max((int)floor(part * side / patch), 0), cells - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS) cortical(const Cortical p) {
    __shared__ Selecting selecting;
    __shared__ unsigned long long counts[THREADS];
    const Spiral& s = p.spiral;
    int image = (int)blockIdx.x, me = (int)threadIdx.x;
    double e0 = p.e0s ? p.e0s[image] : p.e0;
    double* enters = s.enters + (unsigned long long)image * s.candidates;
    float* sites = p.sites + 3ull * image * s.budget;
    Smallest last = first_to_enter(s, image, e0, enters, selecting);

    // The first to enter in the order of the spiral. Each thread looks at some neighbours, and counts those before the
    // last below, those equal to it above.
    unsigned long long bound = key_of(last.kth), mine = 0ull;
    int each = (s.candidates + THREADS - 1) / THREADS;
    int from = min(me * each, s.candidates), end = min(from + each, s.candidates);
    for (int i = from; i < end; ++i) {
        unsigned long long key = key_of(enters[i]);
        mine += key < bound ? 1ull : key == bound ? 1ull << 32 : 0ull;
    }
    mine = sum_before_in_block(mine, counts);
    int below = (int)(unsigned)mine, equal = (int)(mine >> 32);
    for (int i = from; i < end; ++i) {
        unsigned long long key = key_of(enters[i]);
        if (key > bound) continue;
        int place = below + min(equal, last.ties);
        if (key < bound || equal < last.ties) sites[3 * place] = (float)i;  // until its thread makes it a site
        below += key < bound, equal += key == bound;
    }
    __syncthreads();

    double density = (last.kth + last.next) / 2.0, apart = sqrt(TURN / density), longer = max(p.height, p.width);
    double x = s.points[2ull * image], y = s.points[2ull * image + 1];
    for (int place = me; place < s.budget; place += THREADS) {
        float* site = sites + 3 * place;
        double i = (double)site[0], radius = eccentricity((i + 0.5) / density, e0), across, down;
        sincos(i * GOLDEN_ANGLE, &down, &across);
        double at_x = in_picture(x + radius * across / s.width), at_y = in_picture(y + radius * down / s.height);
        site[0] = (float)at_x, site[1] = (float)at_y;
        site[2] = (float)log2(fmax(longer * ((radius + e0) * apart) / p.patch, 1.0));
        if (!p.relevance) continue;
        double dx = (at_x - x) * s.width, dy = (at_y - y) * s.height;
        int row = cell(at_y, p.height, p.patch, p.rows), column = cell(at_x, p.width, p.patch, p.columns);
        float relevance = p.relevance[((unsigned long long)image * p.rows + row) * p.columns + column];
        float magnification = (float)(e0 / (sqrt(dx * dx + dy * dy) + e0));
        p.scores[(unsigned long long)image * s.budget + place] = relevance * magnification;
    }
}
