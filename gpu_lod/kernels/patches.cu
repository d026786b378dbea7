// Patches at sites: patch x patch samples 2^level pixels apart, read from a mean pyramid. A block makes (part of) a patch.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result.
#include "sites.cuh"

struct Patches {
    cudaTextureObject_t texture, texels;  // the same memory, filtered and by the nearest texel
    const float* sites;                   // x, y, level; [layers, budget, 3]
    element* target;                      // [layers, budget, channels, patch, patch]
    float scale[4], offset[4];            // a result is texel * scale + offset, by channel
    float height, width, last;            // last: level
    unsigned budget;
    int patch, channels;
    int border_zero;  // positions outside the image give 0; else they are clamped to the edge
};

extern "C" __global__ void __launch_bounds__(THREADS) patches(const Patches p) {
    unsigned index = blockIdx.x, layer = index / p.budget;
    Site site = site_of(p.sites + 3ull * index, p.width, p.height, p.last, p.patch);
    float read = fminf(site.level, p.last), middle = 0.5f * (float)(p.patch - 1);
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
    element* target = p.target + (unsigned long long)index * p.channels * area;
    for (unsigned at = blockIdx.y * blockDim.x + threadIdx.x; at < area; at += gridDim.y * blockDim.x) {
        unsigned v = at / (unsigned)p.patch, u = at - v * (unsigned)p.patch;
        float x = site.centre_x + ((float)u - middle) * site.stride, y = site.centre_y + ((float)v - middle) * site.stride;
        float4 sample;
        if (site.exact) {
            float texel_x = clamped(site.begin_x + (float)u, 0.0f, site.side_x - 1.0f) + 0.5f;
            float texel_y = clamped(site.begin_y + (float)v, 0.0f, site.side_y - 1.0f) + 0.5f;
            sample = tex2DLayeredLod<float4>(p.texels, texel_x / site.side_x, texel_y / site.side_y, (int)layer, read);
        } else {
            sample = tex2DLayeredLod<float4>(p.texture, x / p.width, y / p.height, (int)layer, read);
        }
        bool outside = p.border_zero && (x < 0.0f || x > p.width || y < 0.0f || y > p.height);
        float values[4] = {sample.x, sample.y, sample.z, sample.w};
#pragma unroll
        for (int channel = 0; channel < 4; ++channel)
            if (channel < p.channels)
                target[(unsigned long long)channel * area + at] =
                    to_element(outside ? 0.0f : values[channel] * p.scale[channel] + p.offset[channel]);
    }
}
