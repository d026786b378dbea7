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

__device__ __forceinline__ Sample sample_at(const Rings& r, unsigned at, int layer) {
    unsigned ring = at / r.wedge_count;
    float2 radius_level = r.rings[ring], direction = r.wedges[at - ring * r.wedge_count];
    Sample s;
    s.x = r.fixations[2ull * layer] + radius_level.x * r.aspect_x * direction.x;
    s.y = r.fixations[2ull * layer + 1] + radius_level.x * r.aspect_y * direction.y;
    s.level = radius_level.y;
    s.zero = r.border_zero && !(s.x >= 0.0f && s.x <= 1.0f && s.y >= 0.0f && s.y <= 1.0f);
    return s;
}
