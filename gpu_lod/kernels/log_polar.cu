// Log-polar maps.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "rings.cuh"

struct LogPolar {
    cudaTextureObject_t texture;
    Rings rings;
};

extern "C" __global__ void __launch_bounds__(THREADS) log_polar(const LogPolar p) {
    each_sample(p.rings, [&](const Sample& s, int layer, element* target, unsigned apart) {
        float4 sample = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!s.zero) sample = tex2DLayeredLod<float4>(p.texture, s.x, s.y, layer, s.level);
        store_planes(target, apart, p.rings.channels, sample);
    });
}
