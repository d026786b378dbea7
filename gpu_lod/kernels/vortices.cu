// Virtual tokens of SoftVortex: how much each blends of every patch, and what it gathers so. A block for each token of
// each image, which goes through all patches.
//
// WEIGHTS is defined for the second of two launches: between them tokens are ordered by the scores that the first
// finds.
#include "block.cuh"

#define MOST_PATCHES 8192  // for which a block has room
#define LEAST (-40.0f)     // of a logarithm below the highest: less weighs nothing

struct Vortices {
    const float* relevance;  // [images, patches], logarithms
    const float* amounts;    // [images, patches]
    const float* least;      // [images], of them
    const float* anchors;    // [tokens, 2], (x, y) in parts of width and height
    const float* squares;    // [tokens], twice a token's spread, squared, times -1
    const float* strengths;  // [tokens]
    const float* x;          // [columns], of the centres of patches, in parts of the width
    const float* y;          // [rows]
    const long long* order;  // [images, tokens], which token is the first, the second, ...
    float* scores;           // [images, tokens]
    float* weights;          // [images, tokens, patches], in that order
    float* sites;            // [images, tokens, 3], (x, y, level)
    float across, down;      // width and height in units of the longer side
    int tokens, rows, columns;
};

__device__ __forceinline__ float part_of(float below) { return expf(below < LEAST ? LEAST : below); }  // NaN stays

// Sums that a block makes at once.
struct Moments {
    float x, y, squares;
    __device__ __forceinline__ void operator+=(const Moments& other) {
        x += other.x, y += other.y, squares += other.squares;
    }
};
struct Gathered {
    float total, amount;
    __device__ __forceinline__ void operator+=(const Gathered& other) { total += other.total, amount += other.amount; }
};

extern "C" __global__ void __launch_bounds__(THREADS) vortices(const Vortices p) {
    __shared__ float parts[MOST_PATCHES];
    __shared__ float shared[THREADS];
    int patches = p.rows * p.columns;
    unsigned image = blockIdx.x / (unsigned)p.tokens;
#ifdef WEIGHTS
    int token = (int)p.order[blockIdx.x];
#else
    int token = (int)(blockIdx.x - image * (unsigned)p.tokens);
#endif
    const float* relevance = p.relevance + (unsigned long long)image * patches;
    float left = p.anchors[2 * token], top = p.anchors[2 * token + 1];
    float square = p.squares[token], strength = p.strengths[token];
    float highest = __uint_as_float(0xff800000u);  // minus infinity
    for (int i = (int)threadIdx.x; i < patches; i += THREADS) {
        int row = i / p.columns;
        float dx = (p.x[i - row * p.columns] - left) * p.across, dy = (p.y[row] - top) * p.down;
        parts[i] = strength * relevance[i] + (dy * dy + dx * dx) / square;
        highest = higher(highest, parts[i]);
    }
    highest = highest_of_block(highest, shared);
#ifdef WEIGHTS
    __shared__ Moments moments[THREADS];
    float total = 0.0f;
    for (int i = (int)threadIdx.x; i < patches; i += THREADS) {
        parts[i] = part_of(parts[i] - highest);
        total += parts[i];
    }
    total = sum_of_block(total, shared);
    float *weights = p.weights + (unsigned long long)blockIdx.x * patches, *site = p.sites + 3ull * blockIdx.x;
    Moments sum = {0.0f, 0.0f, 0.0f};
    for (int i = (int)threadIdx.x; i < patches; i += THREADS) {
        int row = i / p.columns;
        float weight = parts[i] / total;
        weights[i] = weight;
        sum += {weight * p.x[i - row * p.columns], weight * p.y[row], weight * weight};
    }
    sum = sum_of_block(sum, moments);
    if (threadIdx.x == 0) {
        float x = sum.x, y = sum.y, level = -0.5f * log2f(sum.squares);
        // Rounding may step over the edge; NaN stays.
        site[0] = x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x;
        site[1] = y < 0.0f ? 0.0f : y > 1.0f ? 1.0f : y;
        site[2] = level < 0.0f ? 0.0f : level;
    }
#else
    // From the least on, so that equal relevance gives equal scores to the last bit.
    const float* amounts = p.amounts + (unsigned long long)image * patches;
    __shared__ Gathered gathered[THREADS];
    float least = p.least[image];
    Gathered sum = {0.0f, 0.0f};
    for (int i = (int)threadIdx.x; i < patches; i += THREADS) {
        float part = part_of(parts[i] - highest);
        sum += {part, part * (amounts[i] - least)};
    }
    sum = sum_of_block(sum, gathered);
    if (threadIdx.x == 0) p.scores[blockIdx.x] = sum.amount / sum.total + least;
#endif
}
