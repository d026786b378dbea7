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

// A block makes a piece of some rings that follow each other, so that no thread divides; x counts pieces, y those
// rings, z layers. `make` gets a sample of each ring and how many rings there are, their layer, where the first channel
// of the first one goes, and how far apart channels are. All that places them is asked for before any of it is needed.
template <int AT_ONCE, class Make> __device__ __forceinline__ void each_sample(const Rings& r, const Make& make) {
    unsigned wedge = blockIdx.x * blockDim.x + threadIdx.x, samples = r.ring_count * r.wedge_count;
    if (wedge >= r.wedge_count) return;
    float2 direction = r.wedges[wedge];
#pragma unroll 1
    for (int layer = (int)blockIdx.z; layer < r.layers; layer += (int)gridDim.z) {
        float x = r.fixations[2ull * layer], y = r.fixations[2ull * layer + 1];
        element* target = r.target + (unsigned long long)(unsigned)(layer * r.channels) * samples + wedge;
#pragma unroll 1
        for (unsigned ring = blockIdx.y * AT_ONCE; ring < r.ring_count; ring += gridDim.y * AT_ONCE) {
            Sample s[AT_ONCE];
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; ++i) {
                float2 radius_level = r.rings[min(ring + i, r.ring_count - 1)];
                s[i].x = x + radius_level.x * r.aspect_x * direction.x;
                s[i].y = y + radius_level.x * r.aspect_y * direction.y;
                s[i].level = radius_level.y;
                s[i].zero = r.border_zero && !(s[i].x >= 0.0f && s[i].x <= 1.0f && s[i].y >= 0.0f && s[i].y <= 1.0f);
            }
            make(s, min(r.ring_count - ring, (unsigned)AT_ONCE), layer, target + ring * r.wedge_count, samples);
        }
    }
}
