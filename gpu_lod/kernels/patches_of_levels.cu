// The same from levels as they are in memory, planar: for pictures that are read once, which textures are not made of.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result; that of the levels is `stored`.
#include "sites.cuh"

#define MOST_LEVELS 32

struct PatchesOfLevels {
    const void* level[MOST_LEVELS];  // each [layers, channels, h, w]
    const float* sites;              // x, y, level; [layers, budget, 3]
    element* target;                 // [layers, budget, channels, patch, patch]
    float scale[4], offset[4];       // a result is what is stored * scale + offset, by channel
    int height, width, last;         // last: level
    int stored;                      // 0 uint8, 1 float16, 2 bfloat16, 3 float32
    unsigned budget;
    int patch, channels;
    int border_zero;  // positions outside the image give 0; else they are clamped to the edge
};

__device__ __forceinline__ float loaded(const void* from, unsigned long long index, int stored) {
    if (stored == 0) return (float)((const unsigned char*)from)[index];
    if (stored == 1) return half_to_float(((const unsigned short*)from)[index]);
    if (stored == 2) return __uint_as_float((unsigned)((const unsigned short*)from)[index] << 16);
    return ((const float*)from)[index];
}

// Along one side of a level: the two texels about a place, and how far it is from the first.
struct Between {
    int first, second;
    float share;
};

// In double: of a large picture's pixels fp32 leaves too little behind the point.
__device__ __forceinline__ Between between(double pixel, int side, int texels) {
    double at = pixel * ((double)texels / (double)side) - 0.5;
    at = fmin(fmax(at, 0.0), (double)(texels - 1));
    Between b;
    b.first = (int)at;
    b.second = b.first + 1 < texels ? b.first + 1 : b.first;
    b.share = (float)(at - (double)b.first);
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

__device__ __forceinline__ Level seen(const PatchesOfLevels& p, int level, double x, double y) {
    Level l;
    l.height = p.height >> level > 0 ? p.height >> level : 1;
    l.width = p.width >> level > 0 ? p.width >> level : 1;
    l.x = between(x, p.width, l.width);
    l.y = between(y, p.height, l.height);
    return l;
}

__device__ __forceinline__ float bilinear(const PatchesOfLevels& p, int level, const Level& l, unsigned long long plane) {
    unsigned long long first = (plane * l.height + l.y.first) * l.width, second = (plane * l.height + l.y.second) * l.width;
    const void* from = p.level[level];
    float upper = loaded(from, first + l.x.first, p.stored), lower = upper;
    if (l.x.share != 0.0f) upper = mixed(upper, loaded(from, first + l.x.second, p.stored), l.x.share);
    if (l.y.share == 0.0f) return upper;
    lower = loaded(from, second + l.x.first, p.stored);
    if (l.x.share != 0.0f) lower = mixed(lower, loaded(from, second + l.x.second, p.stored), l.x.share);
    return mixed(upper, lower, l.y.share);
}

extern "C" __global__ void __launch_bounds__(THREADS) patches_of_levels(const PatchesOfLevels p) {
    unsigned index = blockIdx.x, layer = index / p.budget;
    Site site = site_of(p.sites + 3ull * index, (float)p.width, (float)p.height, (float)p.last, p.patch);
    float read = fminf(site.level, (float)p.last), middle = 0.5f * (float)(p.patch - 1);
    int fine = (int)read;
    float share = read - (float)fine;
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
    unsigned long long plane = (unsigned long long)layer * p.channels;
    element* target = p.target + (unsigned long long)index * p.channels * area;
    for (unsigned at = blockIdx.y * blockDim.x + threadIdx.x; at < area; at += gridDim.y * blockDim.x) {
        unsigned v = at / (unsigned)p.patch, u = at - v * (unsigned)p.patch;
        double x = (double)site.centre_x + ((double)u - middle) * site.stride;
        double y = (double)site.centre_y + ((double)v - middle) * site.stride;
        Level near = seen(p, fine, x, y), far = near;
        if (site.exact) {
            near.x.first = (int)clamped(site.begin_x + (float)u, 0.0f, site.side_x - 1.0f), near.x.share = 0.0f;
            near.y.first = (int)clamped(site.begin_y + (float)v, 0.0f, site.side_y - 1.0f), near.y.share = 0.0f;
        } else if (share != 0.0f) {
            far = seen(p, fine + 1, x, y);
        }
        bool outside = p.border_zero && (x < 0.0 || x > p.width || y < 0.0 || y > p.height);
        for (int channel = 0; channel < p.channels; ++channel) {
            float value = 0.0f;
            if (!outside) {
                value = bilinear(p, fine, near, plane + channel);
                if (share != 0.0f) value = mixed(value, bilinear(p, fine + 1, far, plane + channel), share);
                value = value * p.scale[channel] + p.offset[channel];
            }
            target[(unsigned long long)channel * area + at] = to_element(value);
        }
    }
}
