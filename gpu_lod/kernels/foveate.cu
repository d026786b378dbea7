// A picture whose sharpness falls with eccentricity: each pixel reads the mean pyramid at its own place and level.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "gaze.cuh"

struct Foveate {
    cudaTextureObject_t texture;  // anisotropic if anisotropy is above 1
    Gaze gaze;
    float anisotropy;  // footprints are as many times as long along the radius as across it
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS(8)) foveate(const Foveate f) {
    const Gaze& g = f.gaze;
    int column = gaze_column(), row = gaze_row();
    if (column >= g.width || row >= g.height) return;
    float x = ((float)column + 0.5f) * g.pixel_x, y = ((float)row + 0.5f) * g.pixel_y;
#pragma unroll 1
    for (int layer = (int)blockIdx.z; layer < g.layers; layer += (int)gridDim.z) {
        Away away = away_from(g, layer, x, y);
        float4 sample;
        if (f.anisotropy > 1.0f) {
            float along = exp2f(fminf(away.level, 64.0f)), across = along / f.anisotropy;
            float out_x = away.e > 0.0f ? away.x / away.e : 1.0f, out_y = away.e > 0.0f ? away.y / away.e : 0.0f;
            float2 by_radius = {out_x * along * g.pixel_x, out_y * along * g.pixel_y};
            float2 by_arc = {-out_y * across * g.pixel_x, out_x * across * g.pixel_y};
            sample = tex2DLayeredGrad<float4>(f.texture, x, y, layer, by_radius, by_arc);
        } else {
            sample = tex2DLayeredLod<float4>(f.texture, x, y, layer, away.level);
        }
        store_planes(gaze_target(g, (unsigned)(layer * g.channels), row, column), area_of(g), g.channels, sample);
    }
}
