// The oriented energy of planes at 0, 45, 90 and 135 degrees: rows by the four filters, then columns by the basis of
// seven, steered. A block makes a tile; borders are mirrored about the outermost samples.
#include "block.cuh"
#include "mirrored.cuh"

#define REACH 4
#define TAPS (2 * REACH + 1)
#define WIDTH 32
#define HEIGHT 16
#define ABOVE (HEIGHT + 2 * REACH)  // rows that a tile rests on

struct Oriented {
    const float* source;  // [layers, height, width]
    float* target;        // [layers, 4, height, width]
    float filters[4][TAPS];
    float share, rest;    // of the third and the first filter in the kernel of Hxxy along x
    float cross;          // Gxy is so many times the second filter along both sides
    float second[4][3], third[4][4];
    int height, width, layers;
};

extern "C" __global__ void __launch_bounds__(THREADS) oriented(const Oriented p) {
    __shared__ float around[ABOVE][WIDTH + 2 * REACH];
    __shared__ float planes[4][ABOVE][WIDTH];
    int left = (int)blockIdx.x * WIDTH, top = (int)blockIdx.y * HEIGHT, me = (int)threadIdx.x;
    unsigned long long area = (unsigned long long)p.height * p.width;
    for (int layer = (int)blockIdx.z; layer < p.layers; layer += (int)gridDim.z) {
        const float* source = p.source + layer * area;
        for (int i = me; i < ABOVE * (WIDTH + 2 * REACH); i += THREADS) {
            int row = i / (WIDTH + 2 * REACH), column = i % (WIDTH + 2 * REACH);
            around[row][column] = source[(unsigned long long)mirrored(top + row - REACH, p.height) * p.width +
                                         mirrored(left + column - REACH, p.width)];
        }
        __syncthreads();
        for (int i = me; i < ABOVE * WIDTH; i += THREADS) {
            int row = i / WIDTH, column = i % WIDTH;
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int k = 0; k < TAPS; ++k) {
                float value = around[row][column + k];
#pragma unroll
                for (int plane = 0; plane < 4; ++plane) sums[plane] += p.filters[plane][k] * value;
            }
#pragma unroll
            for (int plane = 0; plane < 4; ++plane) planes[plane][row][column] = sums[plane];
        }
        __syncthreads();
        for (int i = me; i < HEIGHT * WIDTH; i += THREADS) {
            int row = i / WIDTH, column = i % WIDTH;
            if (top + row >= p.height || left + column >= p.width) continue;
            float xx = 0.0f, xy = 0.0f, yy = 0.0f, xxx = 0.0f, xxy = 0.0f, xyy = 0.0f, yyy = 0.0f;
#pragma unroll
            for (int k = 0; k < TAPS; ++k) {
                float gaussian = planes[0][row + k][column], tilted = planes[1][row + k][column];
                float curved = planes[2][row + k][column], cubic = planes[3][row + k][column];
                xx += p.filters[0][k] * curved;
                xy += p.filters[1][k] * tilted;
                yy += p.filters[2][k] * gaussian;
                xxx += p.filters[0][k] * cubic;
                xxy += p.filters[1][k] * (p.share * curved + p.rest * gaussian);
                xyy += (p.share * p.filters[2][k] + p.rest * p.filters[0][k]) * tilted;
                yyy += p.filters[3][k] * gaussian;
            }
            xy *= p.cross;
            float* target = p.target + 4 * layer * area + (unsigned long long)(top + row) * p.width + left + column;
#pragma unroll
            for (int angle = 0; angle < 4; ++angle) {
                const float *g = p.second[angle], *h = p.third[angle];
                float even = g[0] * xx + g[1] * xy + g[2] * yy;
                float odd = h[0] * xxx + h[1] * xxy + h[2] * xyy + h[3] * yyy;
                target[angle * area] = even * even + odd * odd;
            }
        }
    }
}
