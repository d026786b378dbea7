// Patches at sites: patch x patch samples 2^level pixels apart, read from a mean pyramid. A block makes (part of) a patch.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result.
#include "sites.cuh"

struct Patches {
    cudaTextureObject_t texture, texels;  // the same memory, filtered and by the nearest texel
    float height, width, last;            // last: level
    Wanted wanted;
};

extern "C" __global__ void __launch_bounds__(THREADS) patches(const Patches t) {
    const Wanted& p = t.wanted;
    unsigned index = blockIdx.x, layer = index / p.budget;
    Site site = site_of(p.sites + 3ull * index, t.width, t.height, t.last, p.patch);
    float read = fminf(site.level, t.last), middle = 0.5f * (float)(p.patch - 1);
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
    element* target = p.target + (unsigned long long)index * p.channels * area;
    for (unsigned at = blockIdx.y * blockDim.x + threadIdx.x; at < area; at += gridDim.y * blockDim.x) {
        unsigned v = at / (unsigned)p.patch, u = at - v * (unsigned)p.patch;
        float x = site.centre_x + ((float)u - middle) * site.stride, y = site.centre_y + ((float)v - middle) * site.stride;
        float4 sample;
        if (site.exact) {
            float texel_x = clamped(site.begin_x + (float)u, 0.0f, site.side_x - 1.0f) + 0.5f;
            float texel_y = clamped(site.begin_y + (float)v, 0.0f, site.side_y - 1.0f) + 0.5f;
            sample = tex2DLayeredLod<float4>(t.texels, texel_x / site.side_x, texel_y / site.side_y, (int)layer, read);
        } else {
            sample = tex2DLayeredLod<float4>(t.texture, x / t.width, y / t.height, (int)layer, read);
        }
        bool outside = p.border_zero && (x < 0.0f || x > t.width || y < 0.0f || y > t.height);
        float values[4] = {sample.x, sample.y, sample.z, sample.w};
#pragma unroll
        for (int channel = 0; channel < 4; ++channel)
            if (channel < p.channels)
                target[(unsigned long long)channel * area + at] =
                    to_element(outside ? 0.0f : values[channel] * p.scale[channel] + p.offset[channel]);
    }
}
