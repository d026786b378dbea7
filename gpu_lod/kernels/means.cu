// The centre of each segment, the mean place and colour of its pixels: a block for each segment of each picture.
#define THREADS 128
#include "intrinsics.cuh"

#define TILE (32 * THREADS)  // pixels, a bit of a word for each
#define AT_ONCE 16           // labels that a thread reads before it looks at any

struct Means {
    const double* colours;  // [images, pixels, 3]
    const int* labels;      // [images, pixels], from 1 on
    double* centres;        // [images, segments, 5]: y, x, colour; NaN without pixels
    int rows, columns, segments;
};

// Pixels are summed row by row, one after the other, as scikit-image does: what is as near to two centres stays so.
extern "C" __global__ void __launch_bounds__(THREADS) means(const Means p) {
    __shared__ unsigned words[THREADS];
    __shared__ unsigned short places[TILE];
    __shared__ double values[5][THREADS];
    int me = (int)threadIdx.x, pixels = p.rows * p.columns;
    unsigned image = blockIdx.x / (unsigned)p.segments;
    int label = (int)(blockIdx.x - image * (unsigned)p.segments) + 1;
    unsigned long long first = (unsigned long long)image * (unsigned)pixels;
    const double* colours = p.colours + 3 * first;
    const int* labels = p.labels + first;
    double sum = 0.0;
    int count = 0;
    for (int start = 0; start < pixels; start += TILE) {
        int there = min(pixels - start, TILE);
        words[me] = 0u;
        __syncthreads();
        for (int from = me; from < there; from += AT_ONCE * THREADS) {
            int seen[AT_ONCE];
            for (int i = 0; i < AT_ONCE; ++i) {
                int place = from + i * THREADS;
                seen[i] = place < there ? labels[start + place] : 0;
            }
            for (int i = 0; i < AT_ONCE; ++i) {
                int place = from + i * THREADS;
                if (seen[i] == label) atomicAdd(&words[place / 32], 1u << place % 32);
            }
        }
        __syncthreads();
        int before = 0, all = 0;
        for (int other = 0; other < THREADS; ++other) {
            int some = __popc(words[other]);
            before += other < me ? some : 0;
            all += some;
        }
        for (unsigned mine = words[me]; mine; mine &= mine - 1)
            places[before++] = (unsigned short)(32 * me + __ffs((int)mine) - 1);
        __syncthreads();
        for (int done = 0; done < all; done += THREADS) {
            int some = min(all - done, THREADS);
            if (me < some) {
                int pixel = start + places[done + me], y = pixel / p.columns;
                values[0][me] = y, values[1][me] = pixel - y * p.columns;
                for (int i = 0; i < 3; ++i) values[2 + i][me] = colours[3 * pixel + i];
            }
            __syncthreads();
            if (me < 5)
                for (int i = 0; i < some; ++i) sum += values[me][i];
            __syncthreads();
        }
        count += all;
    }
    if (me < 5) p.centres[5ull * blockIdx.x + me] = sum / (double)count;
}
