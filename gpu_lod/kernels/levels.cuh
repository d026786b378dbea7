// Levels as they are in memory, planar, read with weights of fp32: for pictures that are read once, which textures are
// not made of. STORED_ALIKE: they are of the result's dtype.
#pragma once
#include "sampling.cuh"

#define MOST_LEVELS 32

// Texels of a level to a pixel, along one side: in double, and as what fp32 holds of it and the rest.
struct Steps {
    double whole[MOST_LEVELS];
    float near[MOST_LEVELS], rest[MOST_LEVELS];
};

struct Levels {
    const void* level[MOST_LEVELS];  // each [layers, channels, h, w]
    Steps x, y;
    int height, width, last;         // last: level
    int stored;                      // 0 uint8, 1 float16, 2 bfloat16, 3 float32
};

__device__ __forceinline__ float loaded(const void* from, unsigned long long index, int stored) {
#ifdef STORED_ALIKE
    return to_float(((const element*)from)[index]);
#else
    if (stored == 0) return (float)((const unsigned char*)from)[index];
    if (stored == 1) return half_to_float(((const unsigned short*)from)[index]);
    if (stored == 2) return __uint_as_float((unsigned)((const unsigned short*)from)[index] << 16);
    return ((const float*)from)[index];
#endif
}

// Along one side of a level: the two texels about a place, and how far it is from the first.
struct Between {
    int first, second;
    float share;
};

// In double: of a large picture's pixels fp32 leaves too little behind the point.
__device__ __forceinline__ Between between(double pixel, const Steps& steps, int level, int texels) {
    double at = pixel * steps.whole[level] - 0.5;
    at = fmin(fmax(at, 0.0), (double)(texels - 1));
    Between b;
    b.first = (int)at;
    b.second = b.first + 1 < texels ? b.first + 1 : b.first;
    b.share = (float)(at - (double)b.first);
    return b;
}

// The same of what fp32 holds exactly, a pixel's centre, for GPUs that are slow in double.
__device__ __forceinline__ Between between(float pixel, const Steps& steps, int level, int texels) {
    float step = steps.near[level];
    float at = fminf(fmaxf(fmaf(pixel, step, -0.5f), 0.0f), (float)(texels - 1));
    Between b;
    b.first = (int)at;
    // From the first texel's centre, which takes what `at` was rounded by.
    b.share = fmaf(pixel, step, -((float)b.first + 0.5f)) + pixel * steps.rest[level];
    if (b.share < 0.0f && b.first > 0) b.first -= 1, b.share += 1.0f;
    b.second = b.first + 1 < texels ? b.first + 1 : b.first;
    b.share = b.second == b.first ? 0.0f : fminf(fmaxf(b.share, 0.0f), 1.0f);
    return b;
}

// Of equal ones, infinities too, it is that.
__device__ __forceinline__ float mixed(float a, float b, float share) {
    return share == 0.0f || a == b ? a : a + (b - a) * share;
}

struct Level {
    int height, width;
    Between x, y;
};

template <class Place> __device__ __forceinline__ Level seen(const Levels& p, int level, Place x, Place y) {
    Level l;
    l.height = p.height >> level > 0 ? p.height >> level : 1;
    l.width = p.width >> level > 0 ? p.width >> level : 1;
    l.x = between(x, p.x, level, l.width);
    l.y = between(y, p.y, level, l.height);
    return l;
}

__device__ __forceinline__ float bilinear(const Levels& p, int level, const Level& l, unsigned long long plane) {
    const void* from = p.level[level];
    unsigned long long area = (unsigned long long)(unsigned)l.height * (unsigned)l.width;
    unsigned long long begin = plane * area + (unsigned long long)(unsigned)l.y.first * (unsigned)l.width;
    float upper = loaded(from, begin + l.x.first, p.stored), lower = upper;
    if (l.x.share != 0.0f) upper = mixed(upper, loaded(from, begin + l.x.second, p.stored), l.x.share);
    if (l.y.share == 0.0f) return upper;
    begin += l.y.second == l.y.first ? 0 : l.width;
    lower = loaded(from, begin + l.x.first, p.stored);
    if (l.x.share != 0.0f) lower = mixed(lower, loaded(from, begin + l.x.second, p.stored), l.x.share);
    return mixed(upper, lower, l.y.share);
}

// Between two levels, or from the first of them alone.
__device__ __forceinline__ float trilinear(const Levels& p, int fine, const Level& near, const Level& far, float share,
                                           unsigned long long plane) {
    float value = bilinear(p, fine, near, plane);
    return share == 0.0f ? value : mixed(value, bilinear(p, fine + 1, far, plane), share);
}

// A sample of `channels` planes from `plane` on, at a place in pixels, into as many planes of elements, `area` apart.
template <class Place>
__device__ __forceinline__ void store_trilinear(const Levels& p, Place x, Place y, float level, unsigned long long plane,
                                                int channels, element* target, unsigned long long area) {
    level = fminf(level, (float)p.last);
    int fine = (int)level;
    float share = level - (float)fine;
    Level near = seen(p, fine, x, y), far = near;
    if (share != 0.0f) far = seen(p, fine + 1, x, y);
    for (int channel = 0; channel < channels; ++channel)
        target[channel * area] = to_element(trilinear(p, fine, near, far, share, plane + channel));
}
