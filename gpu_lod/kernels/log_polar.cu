// Log-polar maps.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "rings.cuh"

struct LogPolar {
    cudaTextureObject_t texture;
    Rings rings;
};

#define RINGS 8  // that a thread waits for at once; samplers.py has it too

extern "C" __global__ void __launch_bounds__(THREADS) log_polar(const LogPolar p) {
    each_sample<RINGS>(p.rings, [&](const Sample (&s)[RINGS], unsigned rings, int layer, element* target,
                                    unsigned apart) {
        float4 samples[RINGS];
#pragma unroll
        for (int i = 0; i < RINGS; ++i) {
            samples[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (!s[i].zero) samples[i] = tex2DLayeredLod<float4>(p.texture, s[i].x, s[i].y, layer, s[i].level);
        }
#pragma unroll
        for (unsigned i = 0; i < RINGS; ++i)
            if (i < rings) store_planes(target + i * p.rings.wedge_count, apart, p.rings.channels, samples[i]);
    });
}
