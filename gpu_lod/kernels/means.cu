// The centre of each segment, the mean place and colour of its pixels: a block for each segment of each picture.
#include "intrinsics.cuh"

#define THREADS 32
#define EACH 16  // pixels that follow each other, of a thread
#define TILE (EACH * THREADS)

struct Means {
    const double* colours;  // [images, pixels, 3]
    const int* labels;      // [images, pixels], from 1 on
    double* centres;        // [images, segments, 5]: y, x, colour; NaN without pixels
    int rows, columns, segments;
};

// Pixels are summed row by row, one after the other, as scikit-image does: what is as near to two centres stays so.
extern "C" __global__ void __launch_bounds__(THREADS) means(const Means p) {
    __shared__ int counts[THREADS];
    __shared__ double values[5][TILE];
    int me = (int)threadIdx.x, pixels = p.rows * p.columns;
    unsigned image = blockIdx.x / (unsigned)p.segments;
    int label = (int)(blockIdx.x - image * (unsigned)p.segments) + 1;
    unsigned long long first = (unsigned long long)image * (unsigned)pixels;
    const double* colours = p.colours + 3 * first;
    const int* labels = p.labels + first;
    double sum = 0.0;
    int count = 0;
    for (int start = 0; start < pixels; start += TILE) {
        int begin = start + me * EACH;
        unsigned mine = 0;
        for (int i = 0; i < EACH; ++i)
            if (begin + i < pixels && labels[begin + i] == label) mine |= 1u << i;
        counts[me] = __popc(mine);
        __syncthreads();
        int before = 0, all = 0;
        for (int other = 0; other < THREADS; ++other) {
            before += other < me ? counts[other] : 0;
            all += counts[other];
        }
        for (; mine; mine &= mine - 1) {
            int pixel = begin + __ffs((int)mine) - 1, y = pixel / p.columns;
            values[0][before] = y, values[1][before] = pixel - y * p.columns;
            for (int i = 0; i < 3; ++i) values[2 + i][before] = colours[3 * pixel + i];
            ++before;
        }
        __syncthreads();
        if (me < 5)
            for (int i = 0; i < all; ++i) sum += values[me][i];
        count += all;
    }
    if (me < 5) p.centres[5ull * blockIdx.x + me] = sum / (double)count;
}
