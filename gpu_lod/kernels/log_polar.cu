// Log-polar maps: rows are rings, columns wedges. The tables hold what does not depend on the picture, computed in double
// precision.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "sampling.cuh"

struct LogPolar {
    cudaTextureObject_t texture;
    const float2* rings;      // radius / longer side, level
    const float2* wedges;     // cos, sin
    const float* fixations;   // x, y; one a layer, from any float on
    element* target;          // [layers, channels, rings, wedges]
    float aspect_x, aspect_y;  // longer side / (width, height)
    unsigned ring_count, wedge_count;
    int channels;
    int border_zero;  // positions outside the image give 0; else they are clamped to the edge
};

extern "C" __global__ void __launch_bounds__(THREADS) log_polar(const LogPolar p) {
    unsigned samples = p.ring_count * p.wedge_count, at = blockIdx.x * THREADS + threadIdx.x, layer = blockIdx.y;
    if (at >= samples) return;
    unsigned ring = at / p.wedge_count;
    float2 radius_level = p.rings[ring], direction = p.wedges[at - ring * p.wedge_count];
    const float* centre = p.fixations + 2 * layer;
    float x = centre[0] + radius_level.x * p.aspect_x * direction.x;
    float y = centre[1] + radius_level.x * p.aspect_y * direction.y;
    float4 sample = {0.0f, 0.0f, 0.0f, 0.0f};
    bool inside = x >= 0.0f && x <= 1.0f && y >= 0.0f && y <= 1.0f;
    if (inside || !p.border_zero) sample = tex2DLayeredLod<float4>(p.texture, x, y, (int)layer, radius_level.y);
    store_planes(p.target + (unsigned long long)layer * p.channels * samples + at, samples, p.channels, sample);
}
