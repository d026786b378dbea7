// A mip level on the grid of a quadtree's nodes, patch x patch texels each, and what each node loses against its
// children: a block for each node. One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "block.cuh"
#include "elements.cuh"

struct Losses {
    const element* source;  // [layers, channels, tall, wide], of the level above
    float* means;           // [layers, channels, rows * patch, columns * patch]
    float* lost;            // [layers, rows, columns]
    float unit;             // what is stored is so many times larger
    int tall, wide, channels, rows, columns, patch;
    int height, width, side;  // of the picture, in pixels, and of a texel of the source
};

// How many pixels along a side a texel of the source stands for: fewer where it reaches over an edge.
__device__ __forceinline__ float pixels(int texel, int side, int n) {
    long long left = (long long)n - (long long)texel * side;
    return (float)(left < 0 ? 0 : left < side ? left : side);
}

// Weights of two neighbours: q / (p + q), and p q / (p + q), by which the square of their difference counts.
struct Pair {
    float p, q, share, apart;
};

__device__ __forceinline__ Pair pair(int texel, int side, int n) {
    Pair w;
    w.p = pixels(texel, side, n), w.q = pixels(texel + 1, side, n);
    w.share = w.q / fmaxf(w.p + w.q, 1.0f), w.apart = w.p * w.share;
    return w;
}

extern "C" __global__ void __launch_bounds__(THREADS) losses(const Losses p) {
    __shared__ float all[THREADS];
    unsigned nodes = (unsigned)p.rows * (unsigned)p.columns, layer = blockIdx.x / nodes, node = blockIdx.x % nodes;
    int top = (int)(node / p.columns) * p.patch, left = (int)(node % p.columns) * p.patch, area = p.patch * p.patch;
    float lost = 0.0f;
    for (int at = (int)threadIdx.x; at < p.channels * area; at += THREADS) {
        int channel = at / area, row = top + at % area / p.patch, column = left + at % p.patch;
        const element* source = p.source + ((unsigned long long)layer * p.channels + channel) * p.tall * p.wide;
        Pair y = pair(2 * row, p.side, p.height), x = pair(2 * column, p.side, p.width);
        float value[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                int r = 2 * row + i, c = 2 * column + j;
                value[i][j] =
                    r < p.tall && c < p.wide ? to_float(source[(unsigned long long)r * p.wide + c]) / p.unit : 0.0f;
            }
        float first = value[0][0] - value[1][0], second = value[0][1] - value[1][1];
        lost += first * first * (y.apart * x.p) + second * second * (y.apart * x.q);
        first = value[0][0] - first * y.share, second = value[0][1] - second * y.share;
        lost += (first - second) * (first - second) * ((y.p + y.q) * x.apart);
        p.means[(((unsigned long long)layer * p.channels + channel) * p.rows * p.patch + row) *
                    ((unsigned long long)p.columns * p.patch) +
                column] = first - (first - second) * x.share;
    }
    lost = sum_of_block(lost, all);
    if (threadIdx.x == 0) p.lost[blockIdx.x] = lost;
}
