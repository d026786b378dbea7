// The same from levels as they are in memory.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#define STORED_ALIKE
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
    for (int layer = (int)blockIdx.z; layer < g.layers; layer += (int)gridDim.z) {
        Away away = away_from(g, layer, x / (float)g.width, y / (float)g.height);
        store_trilinear(f.levels, x, y, away.level, (unsigned long long)layer * g.channels, g.channels,
                        gaze_target(g, layer, row, column), (unsigned long long)g.height * g.width);
    }
}
