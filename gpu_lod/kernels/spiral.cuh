// The golden-angle spiral about a fixation, and which of its sites are the first inside the picture: as
// cortical_sites.py has it, in double precision like it.
#pragma once
#include "select.cuh"

#define GOLDEN_ANGLE 2.399963229728653  // pi (3 - sqrt 5)

struct Spiral {
    const double* points;  // [images, 2], fixations in parts of the sides
    double* enters;        // [blocks, candidates], scratch
    double width, height;  // of the picture, in units of its longer side
    int candidates;        // sites of the spiral, from the first on: the budget + 1 are among them
    int budget;
};

// Of M^2 over a disc.
__device__ __forceinline__ double magnified(double e, double e0) {
    double u = e / e0;
    if (u < 1e-4) return u * u * (0.5 - u * (2.0 / 3.0 - u * 0.75));  // where the terms cancel
    return log1p(u) - u / (1.0 + u);
}

// Its inverse, by Newton on ln(1 + u): from the seventh step on, only rounding changes.
__device__ __forceinline__ double eccentricity(double n, double e0) {
    double s = n + sqrt(2.0 * n);
#pragma unroll 1
    for (int step = 0; step < 8; ++step) {
        double fallen = expm1(-s);
        s += (s + fallen - n) / fallen;
    }
    return e0 * expm1(s);
}

__device__ __forceinline__ double to_side(double place, double side, double step) {
    return (step > 0.0 ? side - place : place) / fabs(step);
}

// The densities from which on sites are inside, and of these the budget-th and the next: all that a block needs of its
// image and e0. A thread may read those of the sites i that i % THREADS is its own; others after a barrier.
__device__ __forceinline__ Smallest first_to_enter(const Spiral& s, int image, double e0, double* enters,
                                                   Selecting& shared) {
    double x = s.points[2ull * image] * s.width, y = s.points[2ull * image + 1] * s.height;
    for (int i = (int)threadIdx.x; i < s.candidates; i += THREADS) {
        double across, down;
        sincos(i * GOLDEN_ANGLE, &down, &across);
        // Along an edge of the picture no site leaves through it: that is 0 / 0, which fmin passes over.
        double edge = fmin(to_side(x, s.width, across), to_side(y, s.height, down));
        enters[i] = (i + 0.5) / magnified(edge, e0);
    }
    return smallest_of_block([enters](int i) { return enters[i]; }, s.candidates, s.budget, shared);
}
