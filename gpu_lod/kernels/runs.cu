// The background of HybridAtlas: its cells along a curve, cut into runs of even length, each with a token that stands
// for the square about it. A block for each image.
#include "block.cuh"

#define MOST 1024  // runs, for whose boxes a block has room

struct Runs {
    const unsigned char* cells;  // [images, rows * columns], which are behind
    const long long* counts;     // [images], of runs: no more than such cells
    const long long* order;      // [rows * columns], the cells along the curve
    const float* every;          // [rows * columns, 3], where each cell is read by itself
    unsigned char* middle;       // [images, rows * columns], whether a cell is in the middle of its run
    float* sites;                // [images, rows * columns, 3], (x, y, level) of those that are
    int rows, columns;
    int height, width, patch;
};

extern "C" __global__ void __launch_bounds__(THREADS) runs(const Runs p) {
    __shared__ int counts[THREADS];
    __shared__ int left[MOST], right[MOST], top[MOST], bottom[MOST];  // right and bottom: turned round
    int me = (int)threadIdx.x, all = p.rows * p.columns, parts = (int)p.counts[blockIdx.x];
    const unsigned char* cells = p.cells + (unsigned long long)blockIdx.x * (unsigned)all;
    unsigned char* middle = p.middle + (unsigned long long)blockIdx.x * (unsigned)all;
    float* sites = p.sites + 3ull * blockIdx.x * (unsigned)all;
    for (int i = me; i < MOST; i += THREADS) left[i] = right[i] = top[i] = bottom[i] = all;
    for (int i = me; i < all; i += THREADS) {
        middle[i] = 0;
        for (int j = 0; j < 3; ++j) sites[3 * i + j] = 0.0f;
    }
    int each = (all + THREADS - 1) / THREADS, begin = min(me * each, all), end = min(begin + each, all), before = 0;
    for (int i = begin; i < end; ++i) before += cells[p.order[i]] != 0;
    before = sum_before_in_block(before, counts);
    int there = counts[THREADS - 1];
    if (parts <= 0 || there <= 0) return;  // the whole block
    int turn = before;
    for (int i = begin; i < end; ++i) {
        int cell = (int)p.order[i];
        if (!cells[cell]) continue;
        int run = turn++ * parts / there, y = cell / p.columns, x = cell - y * p.columns;
        atomicMin(left + run, x), atomicMin(right + run, -x);
        atomicMin(top + run, y), atomicMin(bottom + run, -y);
    }
    __syncthreads();
    turn = before;
    for (int i = begin; i < end; ++i) {
        int cell = (int)p.order[i];
        if (!cells[cell]) continue;
        int run = turn * parts / there;
        int first = (run * there + parts - 1) / parts, next = ((run + 1) * there + parts - 1) / parts;
        if (turn++ != (first + next - 1) / 2) continue;
        float* site = sites + 3 * cell;
        middle[cell] = 1;
        if (left[run] == -right[run] && top[run] == -bottom[run]) {
            for (int j = 0; j < 3; ++j) site[j] = p.every[3 * cell + j];
            continue;
        }
        double x = (double)(left[run] * p.patch), y = (double)(top[run] * p.patch);
        double right_end = fmin((double)((1 - right[run]) * p.patch), (double)p.width);
        double bottom_end = fmin((double)((1 - bottom[run]) * p.patch), (double)p.height);
        site[0] = (float)((x + right_end) / (2.0 * p.width));
        site[1] = (float)((y + bottom_end) / (2.0 * p.height));
        double side = fmax(fmax(right_end - x, bottom_end - y), 1.0);
        site[2] = (float)fmax(log2(side / p.patch), 0.0);
    }
}
