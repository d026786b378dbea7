// The search for the e0 at which the fovea holds its share: what is tried in a round, and what that tells.
#pragma once
#include "block.cuh"

#define TRIES 32  // of an image at once

struct Tried {
    double* logs;   // [rounds, images, TRIES], ln e0
    int* within;    // [rounds, images, TRIES], how many of the sites are in the fovea then
    int images;
    int count;  // how many are to be
};

struct Found {
    double low, high;  // ln e0 that the number lies between
    double best;
};

// The larger e0, the fewer sites there are in the fovea: those with more come first.
__device__ __forceinline__ Found found_in(const Tried& t, int round, int image) {
    unsigned long long first = ((unsigned long long)round * t.images + image) * TRIES;
    const double* logs = t.logs + first;
    const int* within = t.within + first;
    int more = 0, fewer = 0, least = abs(within[0] - t.count), alike = 0, middle = 0;
    for (int i = 0; i < TRIES; ++i) {
        int error = abs(within[i] - t.count);
        more += within[i] > t.count, fewer += within[i] < t.count;
        if (error < least) least = error, alike = 0;
        alike += error == least;
    }
    // The middle of the best, so that no site is at the border itself.
    for (int i = 0, left = (alike + 1) / 2; left > 0; ++i) left -= abs(within[i] - t.count) == least, middle = i;
    Found found;
    found.low = logs[max(more - 1, 0)], found.high = logs[min(TRIES - fewer, TRIES - 1)], found.best = logs[middle];
    return found;
}
