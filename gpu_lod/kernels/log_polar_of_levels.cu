// The same from levels as they are in memory.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "levels.cuh"
#include "rings.cuh"

struct LogPolarOfLevels {
    Levels levels;
    Rings rings;
};

extern "C" __global__ void __launch_bounds__(THREADS) log_polar_of_levels(const LogPolarOfLevels p) {
    int channels = p.rings.channels;
    each_sample<1>(p.rings, [&](const Sample (&samples)[1], unsigned, int layer, element* target, unsigned apart) {
        const Sample& s = samples[0];
        if (s.zero)
            for (int channel = 0; channel < channels; ++channel)
                target[(unsigned long long)channel * apart] = to_element(0.0f);
        else
            trilinear<Alike>(p.levels, OfSide{s.x}, OfSide{s.y}, s.level, (unsigned)(layer * channels), channels,
                             [&](float value) { *target = to_element(value), target += apart; });
    });
}
