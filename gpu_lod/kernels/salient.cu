// How much the pixels of each patch stand out: the mean, or the most, of differences between levels 1 and 3, 2 and 4, 3
// and 5 of a Gaussian pyramid. A block for each patch, which goes through it in tiles of TILE x TILE pixels.
#include "block.cuh"

#define TILE 16  // squared, THREADS
#define PAIRS 3
// Samples of the centre that pixels of a tile are read between: TILE / 2 + 2, TILE / 4 + 2, TILE / 8 + 2 a side.
#define SAMPLES(pair) ((TILE >> ((pair) + 1)) + 2)

struct Salient {
    const float* level[PAIRS + 2];  // 1 to 5, [layers, h, w]; samples stand 2^level pixels apart
    float* target;                  // [layers, rows, columns]
    int height, width, rows, columns;
    int patch, most;  // most: of the pixels, else the mean
};

__device__ __forceinline__ int samples_of(int n, int level) { return (n + (1 << level) - 1) >> level; }

__device__ __forceinline__ int before(int a, int b) { return a < b ? a : b; }

__device__ __forceinline__ float between(float a, float b, float share) { return a + (b - a) * share; }

// The centre less the surround, at a sample of the centre; beyond the last one the last is read.
__device__ __forceinline__ float difference(const Salient& p, unsigned layer, int pair, int row, int column) {
    int centre = pair + 1, surround = pair + 3;
    int h = samples_of(p.height, centre), w = samples_of(p.width, centre);
    row = before(row, h - 1), column = before(column, w - 1);
    float here = p.level[pair][((unsigned long long)layer * h + row) * w + column];
    h = samples_of(p.height, surround), w = samples_of(p.width, surround);
    const float* upper = p.level[pair + 2] + ((unsigned long long)layer * h + (row >> 2)) * w;
    const float* lower = p.level[pair + 2] + ((unsigned long long)layer * h + before((row >> 2) + 1, h - 1)) * w;
    int left = column >> 2, right = before(left + 1, w - 1);
    float along = 0.25f * (float)(column & 3), down = 0.25f * (float)(row & 3);
    return here - between(between(upper[left], upper[right], along), between(lower[left], lower[right], along), down);
}

extern "C" __global__ void __launch_bounds__(THREADS) salient(const Salient p) {
    __shared__ float samples[PAIRS][SAMPLES(0) * SAMPLES(0)], all[THREADS];
    unsigned cells = (unsigned)p.rows * (unsigned)p.columns, layer = blockIdx.x / cells, cell = blockIdx.x % cells;
    int tall = before(p.patch, p.height), wide = before(p.patch, p.width), me = (int)threadIdx.x;
    // Flush with the far edges.
    int top = before((int)(cell / p.columns) * p.patch, p.height - tall);
    int left = before((int)(cell % p.columns) * p.patch, p.width - wide);
    float found = 0.0f;
    for (int y = 0; y < tall; y += TILE) {
        for (int x = 0; x < wide; x += TILE) {
            int from = 0;
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                int side = SAMPLES(pair), at = me - from;
                if (at >= 0 && at < side * side)
                    samples[pair][at] = difference(p, layer, pair, ((top + y) >> (pair + 1)) + at / side,
                                                   ((left + x) >> (pair + 1)) + at % side);
                from += side * side;
            }
            __syncthreads();
            int row = y + me / TILE, column = x + me % TILE;
            if (row < tall && column < wide) {
                float total = 0.0f;
#pragma unroll
                for (int pair = 0; pair < PAIRS; ++pair) {
                    int level = pair + 1, side = SAMPLES(pair), within = (1 << level) - 1;
                    const float* s = samples[pair] + (((top + row) >> level) - ((top + y) >> level)) * side +
                                     ((left + column) >> level) - ((left + x) >> level);
                    float along = (float)((left + column) & within) / (float)(1 << level);
                    float down = (float)((top + row) & within) / (float)(1 << level);
                    total += fabsf(between(between(s[0], s[1], along), between(s[side], s[side + 1], along), down));
                }
                found = p.most ? higher(found, total) : found + total;
            }
            __syncthreads();
        }
    }
    float whole = p.most ? highest_of_block(found, all) : sum_of_block(found, all);
    if (me == 0) p.target[blockIdx.x] = whole / (p.most ? (float)PAIRS : (float)PAIRS * (float)tall * (float)wide);
}
