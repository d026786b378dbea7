// Levels as they are in memory, planar, read with weights of fp32: for pictures that are read once, which textures are
// not made of.
#pragma once
#include "sampling.cuh"

#define MOST_LEVELS 32

// Texels of a level to a pixel, along one side: what fp32 holds of it, and the rest.
struct Steps {
    float near[MOST_LEVELS], rest[MOST_LEVELS];
};

struct Levels {
    const void* level[MOST_LEVELS];  // each [layers, channels, h, w]
    Steps x, y;
    int height, width, last;  // last: level
    int stored;               // 0 uint8, 1 float16, 2 bfloat16, 3 float32
};

// What levels are stored as.
struct Alike {  // as the result
    typedef element type;
    static __device__ __forceinline__ float value(element stored) { return to_float(stored); }
};
struct Counts {
    typedef unsigned char type;
    static __device__ __forceinline__ float value(unsigned char stored) { return (float)stored; }
};
struct Halves {
    typedef unsigned short type;
    static __device__ __forceinline__ float value(unsigned short stored) { return half_to_float(stored); }
};
struct Brains {  // bfloat16
    typedef unsigned short type;
    static __device__ __forceinline__ float value(unsigned short stored) {
        return __uint_as_float((unsigned)stored << 16);
    }
};
struct Floats {
    typedef float type;
    static __device__ __forceinline__ float value(float stored) { return stored; }
};

// Places along one side. `past` is how many texels of a level they are past `from`. Products are not rounded before it
// is taken off, so that from a texel nearby the share of the next one is as exact as in double, whose conversions are
// slow even where double is fast.
struct OfSide {  // where it is in [0, 1]
    float at;
    __device__ __forceinline__ float past(float from, const Steps&, int, int texels) const {
        return fmaf(at, (float)texels, -from);
    }
};
struct Pixel {
    float at;
    __device__ __forceinline__ float past(float from, const Steps& steps, int level, int) const {
        return fmaf(at, steps.near[level], -from) + at * steps.rest[level];
    }
};
struct Beside {  // so many pixels beside one
    float at, by;
    __device__ __forceinline__ float past(float from, const Steps& steps, int level, int) const {
        float near = steps.near[level], rest = (at + by) * steps.rest[level];
        return fmaf(at, near, -from) + fmaf(by, near, rest);
    }
};

// Along one side of a level: the first of two texels about a place, and how far it is to the second; none, where that
// weighs nothing.
struct Between {
    int first;
    float share;
};

template <class Place>
__device__ __forceinline__ Between between(const Place& place, const Steps& steps, int level, int texels) {
    float first = floorf(place.past(0.5f, steps, level, texels));
    // From that texel's centre, which finds what `first` was rounded by.
    float share = place.past(first + 0.5f, steps, level, texels), more = floorf(share), last = (float)(texels - 1);
    first += more, share -= more;
    Between b;
    b.first = min((int)fminf(fmaxf(first, 0.0f), last), texels - 1);  // NaN is 0; `last` may be rounded up
    b.share = first >= 0.0f && first < last ? share : 0.0f;
    return b;
}

// Of equal ones, infinities too, it is that.
__device__ __forceinline__ float mixed(float a, float b, float share) { return a == b ? a : a + (b - a) * share; }

// The four texels about a place. Those that weigh nothing are the first one again: nothing else is read, or mixed in.
template <class Stored> struct Corners {
    const typename Stored::type* at;
    unsigned right, below;
    float along, down;
    unsigned long long area;  // to the next plane

    __device__ __forceinline__ bool one() const { return (right | below) == 0; }
    __device__ __forceinline__ float first() const { return Stored::value(at[0]); }
    __device__ __forceinline__ float mean() const {
        float a = Stored::value(at[0]), b = Stored::value(at[right]);
        float c = Stored::value(at[below]), d = Stored::value(at[below + right]);
        return mixed(mixed(a, b, along), mixed(c, d, along), down);
    }
};

template <class Stored>
__device__ __forceinline__ Corners<Stored> corners(const Levels& p, int level, Between x, Between y,
                                                   unsigned plane) {
    unsigned height = (unsigned)max(p.height >> level, 1), width = (unsigned)max(p.width >> level, 1);
    Corners<Stored> c;
    c.area = (unsigned long long)height * width;
    c.at = (const typename Stored::type*)p.level[level] + plane * c.area +
           ((unsigned long long)(unsigned)y.first * width + (unsigned)x.first);
    c.right = x.share != 0.0f ? 1 : 0, c.below = y.share != 0.0f ? width : 0;
    c.along = x.share, c.down = y.share;
    return c;
}

template <class Stored, class Place>
__device__ __forceinline__ Corners<Stored> seen(const Levels& p, int level, const Place& x, const Place& y,
                                                unsigned plane) {
    return corners<Stored>(p, level, between(x, p.x, level, max(p.width >> level, 1)),
                           between(y, p.y, level, max(p.height >> level, 1)), plane);
}

// A sample of `channels` planes, at most four, from `plane` on, one after the other into `put`.
template <class Stored, class Place, class Put>
__device__ __forceinline__ void trilinear(const Levels& p, const Place& x, const Place& y, float level,
                                          unsigned plane, int channels, const Put& put) {
    level = fminf(level, (float)p.last);
    int fine = (int)level;
    float share = level - (float)fine;
    Corners<Stored> near = seen<Stored>(p, fine, x, y, plane);
    if (share == 0.0f) {
        if (near.one())
#pragma unroll 1
            for (int i = 0; i < channels; ++i, near.at += near.area) put(near.first());
        else
#pragma unroll 1
            for (int i = 0; i < channels; ++i, near.at += near.area) put(near.mean());
        return;
    }
    Corners<Stored> far = seen<Stored>(p, fine + 1, x, y, plane);
#pragma unroll
    for (int i = 0; i < 4; ++i, near.at += near.area, far.at += far.area)
        if (i < channels) put(mixed(near.mean(), far.mean(), share));
}
