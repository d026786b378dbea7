// The levels of a pyramid, planes, into the levels of a layered texture, texels.
// One of UINT8, FLOAT16, BFLOAT16 (whose texture is fp32), FLOAT32.
#include "sampling.cuh"

#define MOST_LEVELS 16

struct Fill {
    const element* source[MOST_LEVELS];  // [layers, channels, h, w] of each level
    cudaSurfaceObject_t target[MOST_LEVELS];
    unsigned first_block[MOST_LEVELS];  // of each level
    int height, width, levels, layers, channels;
};

#if defined(UINT8)
typedef unsigned char part;
typedef uchar2 two_parts;
typedef uchar4 four_parts;
#elif defined(FLOAT16)
typedef unsigned short part;
typedef ushort2 two_parts;
typedef ushort4 four_parts;
#else
typedef float part;
typedef float2 two_parts;
typedef float4 four_parts;
#endif

#ifdef BFLOAT16
__device__ __forceinline__ part part_of(element stored) { return to_float(stored); }
#else
__device__ __forceinline__ part part_of(element stored) { return stored; }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) fill(const Fill f) {
    int level = 0;
    while (level + 1 < f.levels && blockIdx.x >= f.first_block[level + 1]) ++level;
    int width = max(f.width >> level, 1), height = max(f.height >> level, 1);
    unsigned area = (unsigned)height * (unsigned)width;
    unsigned blocks = (area + THREADS - 1) / THREADS, block = blockIdx.x - f.first_block[level];
    unsigned layer = block / blocks, at = (block - layer * blocks) * THREADS + threadIdx.x;
    if (at >= area) return;
    int y = (int)(at / (unsigned)width), x = (int)(at - (unsigned)y * (unsigned)width);
    const element* source = f.source[level] + (unsigned long long)layer * f.channels * area + at;
    cudaSurfaceObject_t target = f.target[level];
    part r = part_of(source[0]);
    if (f.channels == 1) {
        surf2DLayeredwrite(r, target, x * (int)sizeof(part), y, (int)layer);
        return;
    }
    part g = part_of(source[area]);
    if (f.channels == 2) {
        two_parts texel = {r, g};
        surf2DLayeredwrite(texel, target, x * (int)sizeof(two_parts), y, (int)layer);
        return;
    }
    part b = part_of(source[2ull * area]), a = f.channels == 4 ? part_of(source[3ull * area]) : (part)0;
    four_parts texel = {r, g, b, a};  // there are no textures of three channels
    surf2DLayeredwrite(texel, target, x * (int)sizeof(four_parts), y, (int)layer);
}
