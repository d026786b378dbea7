// The mean of each patch of pictures, of those at the far edges that of what is inside: a thread for each patch.
#define THREADS 64
#include "intrinsics.cuh"

#define AT_ONCE 32  // pixels that a thread reads before it adds any

struct PatchMeans {
    const float* pictures;  // [planes, height, width]
    float* means;           // [planes, rows, columns]
    unsigned long long patches;
    int height, width, rows, columns;
    int patch;
};

// Summed row by row, one after the other, as torch's avg_pool2d does: superpixels may hang by the last bit.
extern "C" __global__ void __launch_bounds__(THREADS) patch_means(const PatchMeans p) {
    unsigned long long patch = (unsigned long long)blockIdx.x * THREADS + threadIdx.x;
    if (patch >= p.patches) return;
    unsigned long long row = patch / (unsigned)p.columns, plane = row / (unsigned)p.rows;
    int left = (int)(patch - row * (unsigned)p.columns) * p.patch;
    int top = (int)(row - plane * (unsigned)p.rows) * p.patch;
    int across = min(p.patch, p.width - left), many = across * min(p.patch, p.height - top);
    const float* at = p.pictures + (plane * (unsigned)p.height + (unsigned)top) * (unsigned)p.width + (unsigned)left;
    float sum = 0.0f;
    for (int done = 0, x = 0; done < many; done += AT_ONCE) {
        float some[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i) {
            some[i] = done + i < many ? *at : 0.0f;
            bool end = ++x == across;
            at += end ? p.width - across + 1 : 1;
            x = end ? 0 : x;
        }
        for (int i = 0; i < AT_ONCE; ++i) sum += some[i];
    }
    p.means[patch] = sum / (float)many;
}
