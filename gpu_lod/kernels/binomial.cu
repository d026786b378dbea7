// A level of the Gaussian pyramid from the one above it, or from a picture's luma: the 5-tap binomial along both sides,
// every other sample, mirrored about the outermost ones. A block puts the luma that WIDE x TALL samples are made of
// into shared memory, so that each pixel is read once, and four of a row by one instruction where rows begin at fours.
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32.
#include "block.cuh"
#include "elements.cuh"
#include "mirrored.cuh"

#define WIDE 64
#define TALL 8
#define LINES (2 * TALL + 3)
#define FOURS (WIDE / 2 + 2)  // of a line: two pixels more than are needed before it, and three after it
#define EACH (WIDE * TALL / THREADS)  // samples of a thread, one below the other

struct Binomial {
    const element* source;  // [layers, stored, height, width]
    float* target;          // [layers, (height + 1) / 2, (width + 1) / 2]
    float weights[3];       // of the first channels
    int height, width, layers, stored, weighed;  // weighed: how many channels
    int fours;  // rows begin and end at multiples of four elements, and there are three of them or more
};

__device__ __forceinline__ float luma(const Binomial& p, const element* at, unsigned long long area) {
    float sum = p.weights[0] * to_float(at[0]);
    if (p.weighed > 1) sum += p.weights[1] * to_float(at[area]);
    if (p.weighed > 2) sum += p.weights[2] * to_float(at[2 * area]);
    return sum;
}

// Of four neighbours, whose channels are all asked for before the first is needed.
template <int weighed>
__device__ __forceinline__ float4 lumas(const Binomial& p, const element* at, unsigned long long area) {
    Four stored[weighed];
#pragma unroll
    for (int channel = 0; channel < weighed; ++channel, at += area) stored[channel] = *(const Four*)at;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int channel = 0; channel < weighed; ++channel)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += p.weights[channel] * to_float(stored[channel].at[i]);
    return {sums[0], sums[1], sums[2], sums[3]};
}

// Of five neighbours, beginning with an even one.
__device__ __forceinline__ float binomial_of(const float* five) {
    float2 a = *(const float2*)five, b = *(const float2*)(five + 2);
    return 0.0625f * (a.x + five[4]) + 0.25f * (a.y + b.y) + 0.375f * b.x;
}

extern "C" __global__ void __launch_bounds__(THREADS) binomial(const Binomial p) {
    __shared__ float4 fours[LINES * FOURS];
    int me = (int)threadIdx.x, rows = (p.height + 1) / 2, columns = (p.width + 1) / 2;
    int left = (int)blockIdx.x * WIDE, top = (int)blockIdx.y * TALL;  // in samples
    int wide = min(WIDE, columns - left), tall = min(TALL, rows - top);
    int mine = me % WIDE, first = me / WIDE * EACH, lines = 2 * tall + 3;
    unsigned long long area = (unsigned long long)p.height * p.width;
    for (int layer = (int)blockIdx.z; layer < p.layers; layer += (int)gridDim.z) {
        const element* source = p.source + (unsigned long long)layer * p.stored * area;
#pragma unroll 1
        for (int i = me; i < LINES * FOURS; i += THREADS) {
            int line = i / FOURS, x = 2 * left - 4 + 4 * (i - line * FOURS), y = 2 * top - 2 + line;
            if (line >= lines || x >= 2 * (left + wide) + 1) continue;
            if (p.fours && x >= 0 && x < p.width) {
                y = abs(y), y = min(y, 2 * p.height - 2 - y);
                const element* at = source + ((unsigned long long)(unsigned)y * (unsigned)p.width + (unsigned)x);
                fours[i] = p.weighed == 1   ? lumas<1>(p, at, area)
                           : p.weighed == 2 ? lumas<2>(p, at, area)
                                            : lumas<3>(p, at, area);
            } else {
                const element* row = source + (unsigned long long)mirrored(y, p.height) * p.width;
#pragma unroll 1
                for (int k = 0; k < 4; ++k) ((float*)(fours + i))[k] = luma(p, row + mirrored(x + k, p.width), area);
            }
        }
        __syncthreads();
        float along[2 * EACH + 3];
#pragma unroll
        for (int i = 0; i < 2 * EACH + 3; ++i)
            along[i] = binomial_of((const float*)(fours + (2 * first + i) * FOURS) + 2 * mine + 2);
        float* target = p.target + ((unsigned long long)layer * rows + top + first) * columns + left + mine;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (mine < wide && first + i < tall)
                target[(unsigned long long)i * columns] = 0.0625f * (along[2 * i] + along[2 * i + 4]) +
                                                          0.25f * (along[2 * i + 1] + along[2 * i + 3]) +
                                                          0.375f * along[2 * i + 2];
        __syncthreads();
    }
}
