// Where the samples of a log-polar map are, and at which level: what both kernels of it share. Rows are rings, columns
// wedges. The tables hold what does not depend on the picture, computed in double precision.
#pragma once
#include "sampling.cuh"

struct Rings {
    const float2* rings;       // radius / longer side, level
    const float2* wedges;      // cos, sin
    const float* fixations;    // x, y; one a layer, from any float on
    element* target;           // [layers, channels, rings, wedges]
    float aspect_x, aspect_y;  // longer side / (width, height)
    unsigned ring_count, wedge_count;
    int channels, layers;
    int border_zero;  // positions outside the image give 0; else they are clamped to the edge
};

struct Sample {
    float x, y, level;  // x and y in [0, 1] inside the image
    bool zero;
};

// A block makes a piece of one ring, so that no thread divides; x counts pieces, y rings, z layers. `make` gets a
// sample, its layer, where its first channel goes, and how far apart channels are. All that places it is asked for
// before any of it is needed.
template <class Make> __device__ __forceinline__ void each_sample(const Rings& r, const Make& make) {
    unsigned wedge = blockIdx.x * blockDim.x + threadIdx.x, samples = r.ring_count * r.wedge_count;
    if (wedge >= r.wedge_count) return;
    float2 direction = r.wedges[wedge];
#pragma unroll 1
    for (int layer = (int)blockIdx.z; layer < r.layers; layer += (int)gridDim.z) {
        float x = r.fixations[2ull * layer], y = r.fixations[2ull * layer + 1];
        element* target = r.target + (unsigned long long)(unsigned)(layer * r.channels) * samples + wedge;
#pragma unroll 1
        for (unsigned ring = blockIdx.y; ring < r.ring_count; ring += gridDim.y) {
            float2 radius_level = r.rings[ring];
            Sample s;
            s.x = x + radius_level.x * r.aspect_x * direction.x;
            s.y = y + radius_level.x * r.aspect_y * direction.y;
            s.level = radius_level.y;
            s.zero = r.border_zero && !(s.x >= 0.0f && s.x <= 1.0f && s.y >= 0.0f && s.y <= 1.0f);
            make(s, layer, target + ring * r.wedge_count, samples);
        }
    }
}
