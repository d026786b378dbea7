// The same from levels as they are in memory.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "gaze.cuh"
#include "levels.cuh"

struct FoveateOfLevels {
    Levels levels;
    Gaze gaze;
};

extern "C" __global__ void __launch_bounds__(THREADS) foveate_of_levels(const FoveateOfLevels f) {
    const Gaze& g = f.gaze;
    int column = gaze_column(), row = gaze_row();
    if (column >= g.width || row >= g.height) return;
    float x = (float)column + 0.5f, y = (float)row + 0.5f;
#pragma unroll 1
    for (int layer = (int)blockIdx.z; layer < g.layers; layer += (int)gridDim.z) {
        Away away = away_from(g, layer, x * g.pixel_x, y * g.pixel_y);
        unsigned plane = (unsigned)(layer * g.channels);
        element* target = gaze_target(g, plane, row, column);
        trilinear<Alike>(f.levels, Pixel{x}, Pixel{y}, away.level, plane, g.channels,
                         [&](float value) { *target = to_element(value), target += area_of(g); });
    }
}
