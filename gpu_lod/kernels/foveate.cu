// A picture whose sharpness falls with eccentricity: each pixel reads the mean pyramid at its own place and its own level.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "sampling.cuh"

struct Foveate {
    cudaTextureObject_t texture;  // anisotropic if anisotropy is above 1
    const float* fixations;       // x, y; one a layer, from any float on
    element* target;              // [layers, channels, height, width]
    float box_x, box_y;           // (width, height) / longer side / e0
    float bias;
    float anisotropy;  // footprints are as many times as long along the radius as across it
    int height, width, channels;
};

extern "C" __global__ void __launch_bounds__(THREADS) foveate(const Foveate f) {
    // A block makes 32 x 8 pixels, which read neighbouring texels.
    int column = (int)(blockIdx.x * 32 + threadIdx.x % 32), row = (int)(blockIdx.y * (THREADS / 32) + threadIdx.x / 32);
    if (column >= f.width || row >= f.height) return;
    int layer = (int)blockIdx.z;
    const float* centre = f.fixations + 2 * layer;
    float pixel_x = 1.0f / (float)f.width, pixel_y = 1.0f / (float)f.height;
    float x = ((float)column + 0.5f) * pixel_x, y = ((float)row + 0.5f) * pixel_y;
    float away_x = (x - centre[0]) * f.box_x, away_y = (y - centre[1]) * f.box_y;  // in units of e0
    float e = sqrtf(away_x * away_x + away_y * away_y);
    float level = fmaxf(log2f(1.0f + e) + f.bias, 0.0f);
    float4 sample;
    if (f.anisotropy > 1.0f) {
        float along = exp2f(level), across = along / f.anisotropy;
        float out_x = e > 0.0f ? away_x / e : 1.0f, out_y = e > 0.0f ? away_y / e : 0.0f;
        float2 by_radius = {out_x * along * pixel_x, out_y * along * pixel_y};
        float2 by_arc = {-out_y * across * pixel_x, out_x * across * pixel_y};
        sample = tex2DLayeredGrad<float4>(f.texture, x, y, layer, by_radius, by_arc);
    } else {
        sample = tex2DLayeredLod<float4>(f.texture, x, y, layer, level);
    }
    unsigned long long area = (unsigned long long)f.height * f.width;
    store_planes(f.target + (unsigned long long)layer * f.channels * area + (unsigned long long)row * f.width + column,
                 area, f.channels, sample);
}
