// Patches at sites: patch x patch samples 2^level pixels apart, read from a mean pyramid. A block makes (part of) a
// patch: x counts sites, y parts, z layers, so that no thread divides.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32: the dtype of the result.
#include "sites.cuh"

struct Patches {
    cudaTextureObject_t texture, texels;  // the same memory, filtered and by the nearest texel
    float height, width, last;            // last: level
    float pixel_x, pixel_y;               // 1 / (width, height)
    Wanted wanted;
};

#define SAMPLES 4  // that a thread waits for at once; samplers.py has it too

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS(6)) patches(const Patches t) {
    const Wanted& p = t.wanted;
    float middle = 0.5f * (float)(p.patch - 1);
    unsigned area = (unsigned)p.patch * (unsigned)p.patch;
#pragma unroll 1
    for (unsigned layer = blockIdx.z; layer < p.layers; layer += gridDim.z) {
        unsigned index = layer * p.budget + blockIdx.x;
        Site site = site_of(p.sites + 3ull * index, t.width, t.height, t.last, p.patch, p.bias);
        float read = fminf(site.level, t.last);
        element* target = p.target + (unsigned long long)index * (unsigned)p.channels * area;
        // A texel of a level is `stride` pixels long, and a reciprocal is exact enough to meet it.
        float texel_x = t.pixel_x * site.stride, texel_y = t.pixel_y * site.stride;
#pragma unroll 1
        for (unsigned first = blockIdx.y * blockDim.x * SAMPLES + threadIdx.x; first < area;
             first += gridDim.y * blockDim.x * SAMPLES) {
            float4 samples[SAMPLES];
            bool outside[SAMPLES];
#pragma unroll
            for (int i = 0; i < SAMPLES; ++i) {
                unsigned at = first + i * blockDim.x;
                if (i > 0 && at >= area) break;
                unsigned v = row_of(p, at), u = at - v * (unsigned)p.patch;
                float x = site.centre_x + ((float)u - middle) * site.stride;
                float y = site.centre_y + ((float)v - middle) * site.stride;
                if (site.exact) {
                    float column = clamped(site.begin_x + (float)u, 0.0f, site.side_x - 1.0f) + 0.5f;
                    float row = clamped(site.begin_y + (float)v, 0.0f, site.side_y - 1.0f) + 0.5f;
                    samples[i] = tex2DLayeredLod<float4>(t.texels, column * texel_x, row * texel_y, (int)layer, read);
                } else {
                    samples[i] = tex2DLayeredLod<float4>(t.texture, x * t.pixel_x, y * t.pixel_y, (int)layer, read);
                }
                outside[i] = p.border_zero && (x < 0.0f || x > t.width || y < 0.0f || y > t.height);
            }
#pragma unroll
            for (int i = 0; i < SAMPLES; ++i) {
                unsigned at = first + i * blockDim.x;
                if (i > 0 && at >= area) break;
                float values[4] = {samples[i].x, samples[i].y, samples[i].z, samples[i].w};
                element* here = target + at;
#pragma unroll
                for (int channel = 0; channel < 4; ++channel, here += area)
                    if (channel < p.channels)
                        *here = to_element(outside[i] ? 0.0f : values[channel] * p.scale[channel] + p.offset[channel]);
            }
        }
    }
}
