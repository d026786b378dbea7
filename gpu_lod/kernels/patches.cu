// Patches at sites: patch x patch samples 2^level pixels apart, read from a mean pyramid. A block makes (part of) a patch.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result.
#include "sampling.cuh"

// Of a side, 2^-22: as far off may fp32 positions be. A centre no further from a whole or half pixel is there: patches of the
// grid meet texels exactly.
#define ROUNDING (1.0f / 4194304.0f)

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

__device__ __forceinline__ float clamped(float value, float least, float most) {
    return fminf(fmaxf(value, least), most);  // NaN is the least
}

__device__ __forceinline__ float on_pixels(float at, float side) {
    float pixel = at * side, near = rintf(2.0f * pixel) * 0.5f;
    return fabsf(pixel - near) <= side * ROUNDING ? near : pixel;
}

extern "C" __global__ void __launch_bounds__(THREADS) patches(const Patches p) {
    unsigned index = blockIdx.x, layer = index / p.budget;
    const float* site = p.sites + 3ull * index;
    float centre_x = on_pixels(site[0], p.width), centre_y = on_pixels(site[1], p.height);
    float level = clamped(site[2], 0.0f, 30.0f);  // 30 is far beyond any image
    int fine = (int)level;
    float between = level - (float)fine, whole = (float)(1 << fine);
    float stride = between == 0.0f ? whole : whole * exp2f(between);
    // Texels of a level stand on a grid of whole steps only where the sides halve without a rest.
    float begin_x = centre_x / whole - 0.5f * (float)p.patch, begin_y = centre_y / whole - 0.5f * (float)p.patch;
    float side_x = p.width / whole, side_y = p.height / whole;
    bool exact = between == 0.0f && level <= p.last && begin_x == floorf(begin_x) && begin_y == floorf(begin_y) &&
                 side_x == floorf(side_x) && side_y == floorf(side_y);
    float read = fminf(level, p.last), middle = 0.5f * (float)(p.patch - 1);
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
    element* target = p.target + (unsigned long long)index * p.channels * area;
    for (unsigned at = blockIdx.y * blockDim.x + threadIdx.x; at < area; at += gridDim.y * blockDim.x) {
        unsigned v = at / (unsigned)p.patch, u = at - v * (unsigned)p.patch;
        float x = centre_x + ((float)u - middle) * stride, y = centre_y + ((float)v - middle) * stride;
        float4 sample;
        if (exact) {
            float texel_x = clamped(begin_x + (float)u, 0.0f, side_x - 1.0f) + 0.5f;
            float texel_y = clamped(begin_y + (float)v, 0.0f, side_y - 1.0f) + 0.5f;
            sample = tex2DLayeredLod<float4>(p.texels, texel_x / side_x, texel_y / side_y, (int)layer, read);
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
