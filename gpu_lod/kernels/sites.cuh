// Where a site's samples are, and how they are read: what both kernels of patches share.
#pragma once
#include "sampling.cuh"

// Of a side, 2^-22: as far off may fp32 positions be. A centre no further from a whole or half pixel is there: patches
// of the grid meet texels exactly.
#define ROUNDING (1.0f / 4194304.0f)

__device__ __forceinline__ float clamped(float value, float least, float most) {
    return fminf(fmaxf(value, least), most);  // NaN is the least
}

// In pixels, and what fp32 does not hold of it.
__device__ __forceinline__ float on_pixels(float at, float side, float* rest) {
    float pixel = at * side, near = rintf(2.0f * pixel) * 0.5f;
    bool met = fabsf(pixel - near) <= side * ROUNDING;
    *rest = met ? 0.0f : fmaf(at, side, -pixel);
    return met ? near : pixel;
}

struct Wanted {
    const float* sites;         // x, y, level; [layers, budget, 3]
    element* target;            // [layers, budget, channels, patch, patch]
    float scale[4], offset[4];  // a result is what is read * scale + offset, by channel
    unsigned budget;            // sites of an image
    unsigned share;             // ceil(2^32 / patch), or 0 where that is not exact enough to find rows by
    int patch, channels;
    unsigned layers;
    int border_zero;  // positions outside the image give 0; else they are clamped to the edge
    float bias;       // levels that are read above the site's own
};

// The row of a patch's sample, at / patch. With share = (2^32 + r) / patch, 0 <= r < patch, and at = row * patch +
// column, at * share / 2^32 is row + (column + at * r / 2^32) / patch. That is below row + 1 wherever at * r < 2^32, as
// column is at most patch - 1; and at * r < patch^3, which the host compares with 2^32.
__device__ __forceinline__ unsigned row_of(const Wanted& w, unsigned at) {
    return w.share ? (unsigned)((unsigned long long)at * w.share >> 32) : at / (unsigned)w.patch;
}

struct Site {
    float centre_x, centre_y, stride;         // in pixels
    float level;                              // that is read
    float rest_x, rest_y;                     // of the centre
    float begin_x, begin_y, side_x, side_y;   // in texels of the level: where the patch begins, and the picture's sides
    bool exact;                               // its samples are texels of that level
};

// Of (x, y, level), for a picture of this size whose last level is `last`.
__device__ __forceinline__ Site site_of(const float* site, float width, float height, float last, int patch,
                                        float bias) {
    Site s;
    s.centre_x = on_pixels(site[0], width, &s.rest_x), s.centre_y = on_pixels(site[1], height, &s.rest_y);
    float own = clamped(site[2], 0.0f, 30.0f);  // 30 is far beyond any image
    s.level = clamped(own + bias, 0.0f, 30.0f);
    int fine = (int)own;
    // 2^fine and 2^-fine: products with that are what quotients by the other are, bit for bit.
    float between = own - (float)fine, whole = __uint_as_float((unsigned)(127 + fine) << 23);
    float part = __uint_as_float((unsigned)(127 - fine) << 23);
    s.stride = between == 0.0f ? whole : whole * exp2f(between);
    // Texels of a level stand on a grid of whole steps only where the sides halve without a rest.
    s.begin_x = s.centre_x * part - 0.5f * (float)patch, s.begin_y = s.centre_y * part - 0.5f * (float)patch;
    s.side_x = width * part, s.side_y = height * part;
    s.exact = between == 0.0f && s.level == own && own <= last && s.begin_x == floorf(s.begin_x) &&
              s.begin_y == floorf(s.begin_y) && s.side_x == floorf(s.side_x) && s.side_y == floorf(s.side_y);
    return s;
}
