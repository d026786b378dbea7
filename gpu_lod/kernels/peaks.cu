// The highest cells of a small map, one after the other, each inhibiting what is near it: a block for each map.
#include "block.cuh"

struct Peaks {
    const float* values;    // [maps, rows, columns], at most THREADS cells, none negative
    const float* down;      // [rows], the cells' centres in parts of the side
    const float* across;    // [columns]
    const float* central;   // [rows, columns], of equal cells the highest of it comes first
    float* points;          // [maps, count, 2]
    float height, width, longer;
    float reach, keep;  // a peak's radius, squared; what is kept of the cells within it
    int rows, columns, count;
};

// Sums as torch makes them, which are not contracted: of two cells as far from a peak both are near it, or none.
__device__ __forceinline__ float offset(float at, float peak, float side, float longer) {
    return __fdiv_rn(__fmul_rn(at - peak, side), longer);
}

// From a peak to the vertex of the parabola through it and its neighbours, in cells.
__device__ __forceinline__ float vertex(float before, float here, float after) {
    float bend = __fadd_rn(__fadd_rn(before, -2.0f * here), after);
    if (!(bend < 0.0f)) return 0.0f;
    return fminf(fmaxf(__fdiv_rn(0.5f * (before - after), bend), -0.5f), 0.5f);
}

extern "C" __global__ void __launch_bounds__(THREADS) peaks(const Peaks p) {
    __shared__ float values[THREADS], central[THREADS], at[2];
    __shared__ int best[THREADS], fresh[THREADS];  // fresh: no peak was near it
    int cell = (int)threadIdx.x, cells = p.rows * p.columns, row = cell / p.columns, column = cell - row * p.columns;
    bool there = cell < cells;
    values[cell] = there ? p.values[(unsigned long long)blockIdx.x * cells + cell] : 0.0f;
    central[cell] = there ? p.central[cell] : 0.0f;
    fresh[cell] = 1;
    float x = there ? p.across[column] : 0.0f, y = there ? p.down[row] : 0.0f;
    for (int number = 0; number < p.count; ++number) {
        best[cell] = there ? cell : -1;
        __syncthreads();
        for (int step = THREADS / 2; step > 0; step /= 2) {
            if (cell < step) {
                int a = best[cell], b = best[cell + step];
                bool higher = b >= 0 && (a < 0 || values[b] > values[a] ||
                                         (values[b] == values[a] &&
                                          (fresh[b] > fresh[a] ||
                                           (fresh[b] == fresh[a] &&
                                            (central[b] > central[a] || (central[b] == central[a] && b < a))))));
                if (higher) best[cell] = b;
            }
            __syncthreads();
        }
        int peak = best[0];
        if (cell == 0) {
            int peak_row = peak / p.columns, peak_column = peak - peak_row * p.columns;
            float here = values[peak], right = 0.0f, below = 0.0f;
            if (peak_column > 0 && peak_column < p.columns - 1)
                right = vertex(values[peak - 1], here, values[peak + 1]);
            if (peak_row > 0 && peak_row < p.rows - 1)
                below = vertex(values[peak - p.columns], here, values[peak + p.columns]);
            at[0] = fminf(fmaxf(__fdiv_rn(right + (float)peak_column + 0.5f, (float)p.columns), 0.0f), 1.0f);
            at[1] = fminf(fmaxf(__fdiv_rn(below + (float)peak_row + 0.5f, (float)p.rows), 0.0f), 1.0f);
            float* point = p.points + ((unsigned long long)blockIdx.x * p.count + number) * 2;
            point[0] = at[0], point[1] = at[1];
        }
        __syncthreads();
        float dx = offset(x, at[0], p.width, p.longer), dy = offset(y, at[1], p.height, p.longer);
        if (cell == peak || __fadd_rn(__fmul_rn(dx, dx), __fmul_rn(dy, dy)) <= p.reach) {
            values[cell] *= p.keep;
            fresh[cell] = 0;
        }
    }
}
