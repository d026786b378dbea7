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

// A block makes 32 wedges of 8 rings.
__device__ __forceinline__ bool sample_of_thread(const Rings& r, unsigned& ring, unsigned& wedge) {
    unsigned across = (r.wedge_count + 31) / 32, down = blockIdx.x / across;
    wedge = (blockIdx.x - down * across) * 32 + (unsigned)column_in_block();
    ring = down * 8 + (unsigned)row_in_block();
    return ring < r.ring_count && wedge < r.wedge_count;
}

struct Sample {
    float x, y, level;  // x and y in [0, 1] inside the image
    bool zero;
};

__device__ __forceinline__ Sample sample_at(const Rings& r, unsigned ring, unsigned wedge, int layer) {
    float2 radius_level = r.rings[ring], direction = r.wedges[wedge];
    Sample s;
    s.x = r.fixations[2ull * layer] + radius_level.x * r.aspect_x * direction.x;
    s.y = r.fixations[2ull * layer + 1] + radius_level.x * r.aspect_y * direction.y;
    s.level = radius_level.y;
    s.zero = r.border_zero && !(s.x >= 0.0f && s.x <= 1.0f && s.y >= 0.0f && s.y <= 1.0f);
    return s;
}
