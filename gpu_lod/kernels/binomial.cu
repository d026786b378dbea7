// A level of the Gaussian pyramid from the one above it, or from a picture's luma: the 5-tap binomial along both sides,
// every other sample, mirrored about the outermost ones.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "block.cuh"
#include "elements.cuh"

struct Binomial {
    const element* source;  // [layers, stored, height, width]
    float* target;          // [layers, (height + 1) / 2, (width + 1) / 2]
    float weights[3];       // of the first channels
    int height, width, layers, stored, weighed;  // weighed: how many channels
};

__device__ __forceinline__ int mirrored(int i, int n) {
    if (n == 1) return 0;
    int period = 2 * n - 2;
    i = i < 0 ? -i : i;
    i %= period;
    return i < n ? i : period - i;
}

extern "C" __global__ void __launch_bounds__(THREADS) binomial(const Binomial p) {
    int column = (int)(blockIdx.x * 32 + threadIdx.x % 32), row = (int)(blockIdx.y * (THREADS / 32) + threadIdx.x / 32);
    int rows = (p.height + 1) / 2, columns = (p.width + 1) / 2;
    if (column >= columns || row >= rows) return;
    const float taps[5] = {0.0625f, 0.25f, 0.375f, 0.25f, 0.0625f};
    int x[5];
#pragma unroll
    for (int k = 0; k < 5; ++k) x[k] = mirrored(2 * column + k - 2, p.width);
    unsigned long long area = (unsigned long long)p.height * p.width;
    for (int layer = (int)blockIdx.z; layer < p.layers; layer += (int)gridDim.z) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < 5; ++k) {
            const element* from = p.source + (unsigned long long)layer * p.stored * area +
                                  (unsigned long long)mirrored(2 * row + k - 2, p.height) * p.width;
            float sum = 0.0f;
#pragma unroll
            for (int channel = 0; channel < 3; ++channel) {
                if (channel >= p.weighed) break;
                float along = 0.0f;
#pragma unroll
                for (int j = 0; j < 5; ++j) along += taps[j] * to_float(from[channel * area + x[j]]);
                sum += p.weights[channel] * along;
            }
            total += taps[k] * sum;
        }
        p.target[((unsigned long long)layer * rows + row) * columns + column] = total;
    }
}
