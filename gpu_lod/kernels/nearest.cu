// The nearest centre of each pixel, in place and colour, of those whose windows it is in: a thread for each pixel of
// each picture.
#define THREADS 64  // few, so that a small picture has many blocks
#include "intrinsics.cuh"

struct Nearest {
    const double* colours;  // [images, pixels, 3]
    const double* centres;  // [images, segments, 5]: y, x, colour; null: those of the grid, which have none
    int* labels;            // [images, pixels], of before: kept by a pixel that is in no window
    double weight;          // of distances in place
    int rows, columns, segments;
    int first_y, first_x, step_y, step_x, across;  // the grid: `across` centres a row
    int reach_y, reach_x;                          // of a window
    int tiles;                                     // of THREADS pixels, in a picture
};

struct Window {
    int top, bottom, left, right;
};

// Of a segment without pixels, whose centre is no number: none.
__device__ __forceinline__ Window window_of(const Nearest& p, double y, double x) {
    if (!(y == y && x == x)) return {0, 0, 0, 0};
    return {(int)fmax(y - p.reach_y, 0.0), (int)fmin(y + p.reach_y + 1.0, (double)p.rows),
            (int)fmax(x - p.reach_x, 0.0), (int)fmin(x + p.reach_x + 1.0, (double)p.columns)};
}

// Rounded one by one: of two centres as near, the first has the pixel.
__device__ __forceinline__ double square(double value) { return __dmul_rn(value, value); }

extern "C" __global__ void __launch_bounds__(THREADS) nearest(const Nearest p) {
    __shared__ double centres[5][THREADS];
    __shared__ Window windows[THREADS];
    int me = (int)threadIdx.x, pixels = p.rows * p.columns;
    unsigned image = blockIdx.x / (unsigned)p.tiles;
    int pixel = (int)(blockIdx.x - image * (unsigned)p.tiles) * THREADS + me;
    bool inside = pixel < pixels;
    int y = pixel / p.columns, x = pixel - y * p.columns;
    unsigned long long at = (unsigned long long)image * (unsigned)pixels + (unsigned)(inside ? pixel : 0);
    const double* colour = p.colours + 3 * at;
    double l = colour[0], a = colour[1], b = colour[2];
    double least = __longlong_as_double(0x7ff0000000000000ll);
    int label = p.centres && inside ? p.labels[at] : 0;
    for (int start = 0; start < p.segments; start += THREADS) {
        int segment = start + me;
        if (segment < p.segments) {
            double centre[5] = {(double)(p.first_y + segment / p.across * p.step_y),
                                (double)(p.first_x + segment % p.across * p.step_x)};
            if (p.centres)
                for (int i = 0; i < 5; ++i)
                    centre[i] =
                        p.centres[5 * ((unsigned long long)image * (unsigned)p.segments + (unsigned)segment) + i];
            for (int i = 0; i < 5; ++i) centres[i][me] = centre[i];
            windows[me] = window_of(p, centre[0], centre[1]);
        }
        __syncthreads();
        for (int i = 0; i < THREADS && start + i < p.segments; ++i) {
            Window window = windows[i];
            if (y < window.top || y >= window.bottom || x < window.left || x >= window.right) continue;
            double place = __dadd_rn(square(centres[0][i] - y), square(centres[1][i] - x));
            double away = __dadd_rn(square(l - centres[2][i]), square(a - centres[3][i]));
            away = __dadd_rn(__dmul_rn(place, p.weight), __dadd_rn(away, square(b - centres[4][i])));
            if (away < least) least = away, label = start + i + 1;
        }
        __syncthreads();
    }
    if (inside) p.labels[at] = label;
}
