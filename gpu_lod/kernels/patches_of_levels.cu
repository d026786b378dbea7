// The same from levels as they are in memory.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result.
#include "levels.cuh"
#include "sites.cuh"

struct PatchesOfLevels {
    Levels levels;
    Wanted wanted;
};

extern "C" __global__ void __launch_bounds__(THREADS) patches_of_levels(const PatchesOfLevels given) {
    const Levels& l = given.levels;
    const Wanted& p = given.wanted;
    unsigned index = blockIdx.x, layer = index / p.budget;
    Site site = site_of(p.sites + 3ull * index, (float)l.width, (float)l.height, (float)l.last, p.patch);
    float read = fminf(site.level, (float)l.last), middle = 0.5f * (float)(p.patch - 1);
    int fine = (int)read;
    float share = read - (float)fine;
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
    unsigned long long plane = (unsigned long long)layer * p.channels;
    element* target = p.target + (unsigned long long)index * p.channels * area;
    for (unsigned at = blockIdx.y * blockDim.x + threadIdx.x; at < area; at += gridDim.y * blockDim.x) {
        unsigned v = at / (unsigned)p.patch, u = at - v * (unsigned)p.patch;
        double x = (double)site.centre_x + ((double)u - middle) * site.stride;
        double y = (double)site.centre_y + ((double)v - middle) * site.stride;
        Level near = seen(l, fine, x, y), far = near;
        if (site.exact) {
            near.x.first = (int)clamped(site.begin_x + (float)u, 0.0f, site.side_x - 1.0f), near.x.share = 0.0f;
            near.y.first = (int)clamped(site.begin_y + (float)v, 0.0f, site.side_y - 1.0f), near.y.share = 0.0f;
        } else if (share != 0.0f) {
            far = seen(l, fine + 1, x, y);
        }
        bool outside = p.border_zero && (x < 0.0 || x > l.width || y < 0.0 || y > l.height);
        for (int channel = 0; channel < p.channels; ++channel) {
            float value = 0.0f;
            if (!outside) {
                value = trilinear(l, fine, near, far, share, plane + channel);
                value = value * p.scale[channel] + p.offset[channel];
            }
            target[(unsigned long long)channel * area + at] = to_element(value);
        }
    }
}
