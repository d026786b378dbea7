// Pictures cut into patches without a remainder: a block for AT_ONCE patches beside each other.
#include "block.cuh"

#define AT_ONCE 4  // patches of which a thread reads before it writes any

struct Tiles {
    const float* pictures;  // [images, channels, rows * patch, columns * patch]
    float* tiles;           // [images, rows, columns, channels, patch, patch]
    int channels, rows, columns, patch;
    int groups;  // of patches, in a row
    int step;    // 4, 2 or 1 pixels at once, which the patch is whole ones of, and begin where such may
};

template <class Pixels> __device__ __forceinline__ void cut(const Tiles& p) {
    unsigned step = (unsigned)(sizeof(Pixels) / sizeof(float));
    unsigned patch = (unsigned)p.patch, columns = (unsigned)p.columns;
    unsigned across = patch / step, area = across * patch, all = area * (unsigned)p.channels;
    unsigned line = blockIdx.x / (unsigned)p.groups, column = (blockIdx.x - line * (unsigned)p.groups) * AT_ONCE;
    unsigned image = line / (unsigned)p.rows, row = line - image * (unsigned)p.rows;
    for (unsigned at = threadIdx.x; at < all; at += THREADS) {
        unsigned channel = at / area, rest = at - channel * area, y = rest / across, x = rest - y * across;
        unsigned long long plane = (unsigned long long)image * (unsigned)p.channels + channel;
        unsigned long long from = (plane * (unsigned)p.rows + row) * patch + y;
        const Pixels* source = (const Pixels*)p.pictures + (from * columns + column) * across + x;
        Pixels* target = (Pixels*)p.tiles + ((unsigned long long)line * columns + column) * all + at;
        Pixels some[AT_ONCE];
        for (unsigned i = 0; i < AT_ONCE; ++i)
            if (column + i < columns) some[i] = source[i * across];
        for (unsigned i = 0; i < AT_ONCE; ++i)
            if (column + i < columns) target[i * all] = some[i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) tiles(const Tiles p) {
    if (p.step == 4) cut<float4>(p);
    else if (p.step == 2) cut<float2>(p);
    else cut<float>(p);
}
