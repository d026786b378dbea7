// Log-polar maps.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "rings.cuh"

struct LogPolar {
    cudaTextureObject_t texture;
    Rings rings;
};

extern "C" __global__ void __launch_bounds__(THREADS) log_polar(const LogPolar p) {
    const Rings& r = p.rings;
    unsigned samples = r.ring_count * r.wedge_count, at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= samples) return;
    for (int layer = (int)blockIdx.y; layer < r.layers; layer += (int)gridDim.y) {
        Sample s = sample_at(r, at, layer);
        float4 sample = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!s.zero) sample = tex2DLayeredLod<float4>(p.texture, s.x, s.y, layer, s.level);
        store_planes(r.target + (unsigned long long)layer * r.channels * samples + at, samples, r.channels, sample);
    }
}
