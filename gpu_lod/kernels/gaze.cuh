// Where the pixels of a foveated picture are read, and at which level: what both kernels of foveation share.
#pragma once
#include "sampling.cuh"

struct Gaze {
    const float* fixations;  // x, y; one a layer, from any float on
    element* target;         // [layers, channels, height, width]
    float box_x, box_y;      // (width, height) / longer side / e0
    float bias;
    float pixel_x, pixel_y;  // 1 / (width, height)
    int height, width, channels, layers;
};

// A block makes 32 x 8 pixels, which read neighbouring texels.
__device__ __forceinline__ int gaze_column() { return (int)(blockIdx.x * 32 + threadIdx.x % 32); }
__device__ __forceinline__ int gaze_row() { return (int)(blockIdx.y * (THREADS / 32) + threadIdx.x / 32); }

struct Away {
    float x, y, e;  // from the fixation, in units of e0
    float level;
};

// x and y are the pixel's, in [0, 1].
__device__ __forceinline__ Away away_from(const Gaze& g, int layer, float x, float y) {
    Away a;
    a.x = (x - g.fixations[2ull * layer]) * g.box_x, a.y = (y - g.fixations[2ull * layer + 1]) * g.box_y;
    a.e = quick_root(a.x * a.x + a.y * a.y);
    float beyond = 1.0f + a.e;
    a.level = fmaxf((beyond == 1.0f ? 0.0f : quick_log2(beyond)) + g.bias, 0.0f);
    return a;
}

__device__ __forceinline__ unsigned long long area_of(const Gaze& g) {
    return (unsigned long long)(unsigned)g.height * (unsigned)g.width;
}

// Of the layer's first channel.
__device__ __forceinline__ element* gaze_target(const Gaze& g, unsigned plane, int row, int column) {
    return g.target + plane * area_of(g) + ((unsigned long long)(unsigned)row * (unsigned)g.width + (unsigned)column);
}
