// What the Voronoi cell of each peak holds: a block for each peak of each image.
#include "block.cuh"

struct Cells {
    const float* amounts;  // [images, rows, columns], of level-0 patches
    const float* points;   // [images, peaks, 2]: x, y
    double* weight;        // [images, peaks], the amounts of the patches in each cell
    long long* room;       // [images, peaks], `most` for a cell with a patch in it, else 0
    long long most;
    double width, height, patch;  // in pixels
    float part_x, part_y;         // (width, height) in units of the longer side
    int rows, columns, peaks;
};

// The centre of a level-0 patch, in parts of the side; one at the far edge is flush with it.
__device__ __forceinline__ float centre(int cell, double patch, double side) {
    double at = patch >= side ? side / 2.0 : fmin(((double)cell + 0.5) * patch, side - patch / 2.0);
    return (float)(at / side);
}

// As voronoi.py has it.
constexpr float ALIKE = 1.0f + 1.0f / 262144.0f;

// Squared, as torch computes it, which is not contracted.
__device__ __forceinline__ float distance(const Cells& p, const float* point, float x, float y) {
    float dx = __fmul_rn(x - point[0], p.part_x), dy = __fmul_rn(y - point[1], p.part_y);
    return __fadd_rn(__fmul_rn(dy, dy), __fmul_rn(dx, dx));
}

extern "C" __global__ void __launch_bounds__(THREADS) cells(const Cells p) {
    __shared__ double weights[THREADS];
    __shared__ int patches[THREADS];
    unsigned image = blockIdx.x / (unsigned)p.peaks;
    int me = (int)(blockIdx.x - image * (unsigned)p.peaks), size = p.rows * p.columns;
    const float* points = p.points + 2ull * image * (unsigned)p.peaks;
    const float* amounts = p.amounts + (unsigned long long)image * (unsigned)size;
    double weight = 0.0;
    int held = 0;
    for (int cell = (int)threadIdx.x; cell < size; cell += THREADS) {
        int row = cell / p.columns;
        float x = centre(cell - row * p.columns, p.patch, p.width), y = centre(row, p.patch, p.height);
        float mine = distance(p, points + 2 * me, x, y);
        float least = mine;
        for (int other = 0; other < p.peaks; ++other) least = fminf(least, distance(p, points + 2 * other, x, y));
        float bound = __fmul_rn(least, ALIKE);  // of the peaks that are as near, the first has the patch
        bool nearest = mine <= bound;
        for (int other = 0; nearest && other < me; ++other) nearest = distance(p, points + 2 * other, x, y) > bound;
        if (nearest) weight += (double)amounts[cell], ++held;
    }
    weight = sum_of_block(weight, weights);
    held = sum_of_block(held, patches);
    if (threadIdx.x == 0) p.weight[blockIdx.x] = weight, p.room[blockIdx.x] = held > 0 ? p.most : 0;
}
