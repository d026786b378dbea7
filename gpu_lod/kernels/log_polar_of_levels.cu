// The same from levels as they are in memory.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#define STORED_ALIKE
#include "levels.cuh"
#include "rings.cuh"

struct LogPolarOfLevels {
    Levels levels;
    Rings rings;
};

extern "C" __global__ void __launch_bounds__(THREADS) log_polar_of_levels(const LogPolarOfLevels p) {
    const Rings& r = p.rings;
    unsigned samples = r.ring_count * r.wedge_count, at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= samples) return;
    for (int layer = (int)blockIdx.y; layer < r.layers; layer += (int)gridDim.y) {
        Sample s = sample_at(r, at, layer);
        unsigned long long plane = (unsigned long long)layer * r.channels;
        element* target = r.target + plane * samples + at;
        if (s.zero)
            for (int channel = 0; channel < r.channels; ++channel)
                target[(unsigned long long)channel * samples] = to_element(0.0f);
        else
            store_trilinear(p.levels, (double)s.x * p.levels.width, (double)s.y * p.levels.height, s.level, plane, r.channels,
                            target, samples);
    }
}
