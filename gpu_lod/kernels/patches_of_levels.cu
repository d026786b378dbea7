// The same from levels as they are in memory.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result.
#include "levels.cuh"
#include "sites.cuh"

struct PatchesOfLevels {
    Levels levels;
    Wanted wanted;
};

template <class Stored> __device__ __forceinline__ void make(const Levels& l, const Wanted& p) {
    float middle = 0.5f * (float)(p.patch - 1), wide = (float)l.width, tall = (float)l.height;
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
#pragma unroll 1
    for (unsigned layer = blockIdx.z; layer < p.layers; layer += gridDim.z) {
        unsigned index = layer * p.budget + blockIdx.x;
        Site site = site_of(p.sites + 3ull * index, wide, tall, (float)l.last, p.patch, p.bias);
        unsigned plane = layer * (unsigned)p.channels;
        element* patch = p.target + (unsigned long long)index * (unsigned)p.channels * area;
#pragma unroll 1
        for (unsigned at = blockIdx.y * blockDim.x + threadIdx.x; at < area; at += gridDim.y * blockDim.x) {
            unsigned v = row_of(p, at), u = at - v * (unsigned)p.patch;
            Beside x = {site.centre_x, ((float)u - middle) * site.stride + site.rest_x};
            Beside y = {site.centre_y, ((float)v - middle) * site.stride + site.rest_y};
            element* target = patch + at;
            int channel = 0;
            auto put = [&](float value) {
                *target = to_element(value * p.scale[channel] + p.offset[channel]);
                target += area, ++channel;
            };
            float place_x = x.at + x.by, place_y = y.at + y.by;
            if (p.border_zero && (place_x < 0.0f || place_x > wide || place_y < 0.0f || place_y > tall)) {
#pragma unroll 1
                for (; channel < p.channels; ++channel, target += area) *target = to_element(0.0f);
            } else if (site.exact) {
                Between column = {(int)clamped(site.begin_x + (float)u, 0.0f, site.side_x - 1.0f), 0.0f};
                Between row = {(int)clamped(site.begin_y + (float)v, 0.0f, site.side_y - 1.0f), 0.0f};
                Corners<Stored> texel = corners<Stored>(l, (int)site.level, column, row, plane);
#pragma unroll 1
                while (channel < p.channels) put(texel.first()), texel.at += texel.area;
            } else {
                trilinear<Stored>(l, x, y, site.level, plane, p.channels, put);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) patches_of_levels(const PatchesOfLevels given) {
    const Levels& l = given.levels;
    if (l.stored == 0) make<Counts>(l, given.wanted);
    else if (l.stored == 1) make<Halves>(l, given.wanted);
    else if (l.stored == 2) make<Brains>(l, given.wanted);
    else make<Floats>(l, given.wanted);
}
