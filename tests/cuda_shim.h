// CUDA C++ on a CPU, for one block at a time. Stands in for intrinsics.cuh and for what NVRTC has built in.
//
// The threads of a block are fibers that run from barrier to barrier, in an order that the caller chooses: what one order
// computes and another does not is a missing barrier. In a shuffled order others may run before each atomic operation.
// Shared memory holds rubbish when a block begins. What no GPU would forgive ends in a message: a barrier that not all
// threads reach, a count that does not come after a fence, a surface written outside, a vector loaded or stored where none
// may begin. cuda_runner.cc is what runs them, and has the headers that take longer to compile than a kernel does.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#pragma GCC visibility push(hidden)  // every kernel's library has a runner of its own

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))

struct Index { unsigned x, y, z; };
struct alignas(2) uchar2 { unsigned char x, y; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
struct alignas(4) ushort2 { unsigned short x, y; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
typedef unsigned long long cudaTextureObject_t, cudaSurfaceObject_t;

extern Index threadIdx, blockIdx, blockDim, gridDim;

inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline double __longlong_as_double(long long bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

inline long long __double_as_longlong(double value) {
    long long bits;
    memcpy(&bits, &value, 8);
    return bits;
}

// Rounded one by one, which no compiler contracts here.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 255u) * (b >> shift & 255u);
    return sum;
}

template <class T> T __ldg(const T* at) { return *at; }

// Halves of a word by two bytes of another one.
inline unsigned dp2a(unsigned a, unsigned b, unsigned sum) {
    return sum + (a & 0xffffu) * (b & 255u) + (a >> 16) * (b >> 8 & 255u);
}
inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) { return dp2a(a, b, sum); }
inline unsigned __dp2a_hi(unsigned a, unsigned b, unsigned sum) { return dp2a(a, b >> 16, sum); }

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31u));
}

inline float half_to_float(unsigned short bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? ldexpf((float)fraction, -24)
                                 : ldexpf((float)(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -size : size;
}

inline unsigned short float_to_half(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return 0x7fff;
    if (size >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    if (size < 0x38800000u)  // subnormal: the sum with 0.5 rounds
        return (unsigned short)(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
}

inline float quick_root(float value) { return sqrtf(value); }
inline float quick_log2(float value) { return log2f(value); }

// -- the threads of a block -------------------------------------------------------------------------------------------

void wait_at(int line);
#define __syncthreads() wait_at(__LINE__)
void __threadfence();

unsigned count_up(unsigned* counter, unsigned by, int line);
int count_up(int* counter, int by, int line);
#define atomicAdd(counter, by) count_up(counter, by, __LINE__)
int atomicMin(int* lowest, int value);

void complain(const char* what, int line);
const char* run_grid(void (*kernel)(), Index grid, int threads, int order, unsigned seed);

// -- textures and surfaces --------------------------------------------------------------------------------------------

struct EmulatedTexture {
    char* level[16];
    int width, height, layers, levels, channels;
    int bytes;     // of a channel: 1 fractions of 255, 2 fp16, 4 fp32
    int filtered;  // else the nearest texel of the nearest level
    int anisotropy;
};

struct EmulatedSurface {
    char* data;
    int width, height, layers, texel_bytes;
};

template <class T> void surf2DLayeredwrite(T value, cudaSurfaceObject_t object, int x, int y, int layer) {
    const EmulatedSurface& s = *(const EmulatedSurface*)object;
    if ((int)sizeof(T) != s.texel_bytes || x % s.texel_bytes || x < 0 || x >= s.width * s.texel_bytes || y < 0 ||
        y >= s.height || layer < 0 || layer >= s.layers)
        return complain("a surface is written outside, or in texels of another size", 0);
    memcpy(s.data + ((size_t)layer * s.height + y) * s.width * s.texel_bytes + x, &value, sizeof(T));
}

static float4 texel_at(const EmulatedTexture& t, int level, int x, int y, int layer) {
    int width = max(t.width >> level, 1), height = max(t.height >> level, 1);
    x = min(max(x, 0), width - 1);
    y = min(max(y, 0), height - 1);
    float channel[4] = {NAN, NAN, NAN, NAN};  // nobody may use one that the texture has not
    if (layer < 0 || layer >= t.layers) complain("a layer is read that the texture has not", layer);
    const char* at = t.level[level] + (((size_t)layer * height + y) * width + x) * t.channels * t.bytes;
    for (int i = 0; i < t.channels; ++i, at += t.bytes) {
        unsigned short half;
        if (t.bytes == 1) channel[i] = (float)(unsigned char)*at / 255.0f;
        else if (t.bytes == 2) memcpy(&half, at, 2), channel[i] = half_to_float(half);
        else memcpy(channel + i, at, 4);
    }
    return {channel[0], channel[1], channel[2], channel[3]};
}

// Weights have 8 fractional bits (CUDA Programming Guide, "Texture Fetching").
inline float weight(float share) { return rintf(share * 256.0f) / 256.0f; }

static float4 mixed(float4 a, float4 b, float share) {
    float keep = 1.0f - share;
    return {keep * a.x + share * b.x, keep * a.y + share * b.y, keep * a.z + share * b.z, keep * a.w + share * b.w};
}

static float4 bilinear(const EmulatedTexture& t, int level, float x, float y, int layer) {
    float width = (float)max(t.width >> level, 1), height = (float)max(t.height >> level, 1);
    float u = fminf(fmaxf(x * width - 0.5f, -1.0f), width), v = fminf(fmaxf(y * height - 0.5f, -1.0f), height);
    int i = (int)floorf(u), j = (int)floorf(v);
    float a = weight(u - (float)i), b = weight(v - (float)j);
    return mixed(mixed(texel_at(t, level, i, j, layer), texel_at(t, level, i + 1, j, layer), a),
                 mixed(texel_at(t, level, i, j + 1, layer), texel_at(t, level, i + 1, j + 1, layer), a), b);
}

template <class T> T tex2DLayeredLod(cudaTextureObject_t object, float x, float y, int layer, float level) {
    const EmulatedTexture& t = *(const EmulatedTexture*)object;
    level = fminf(fmaxf(level, 0.0f), (float)(t.levels - 1));
    if (!t.filtered) {
        int nearest = (int)floorf(level + 0.5f);
        float width = (float)max(t.width >> nearest, 1), height = (float)max(t.height >> nearest, 1);
        return texel_at(t, nearest, (int)floorf(x * width), (int)floorf(y * height), layer);
    }
    int fine = (int)level;
    float4 result = bilinear(t, fine, x, y, layer);
    float share = weight(level - (float)fine);
    return share > 0.0f ? mixed(result, bilinear(t, min(fine + 1, t.levels - 1), x, y, layer), share) : result;
}

// As EXT_texture_filter_anisotropic describes it.
template <class T>
T tex2DLayeredGrad(cudaTextureObject_t object, float x, float y, int layer, float2 by_x, float2 by_y) {
    const EmulatedTexture& t = *(const EmulatedTexture*)object;
    float a = hypotf(by_x.x * t.width, by_x.y * t.height), b = hypotf(by_y.x * t.width, by_y.y * t.height);
    float2 longer = a > b ? by_x : by_y;
    int probes = (int)fminf(ceilf(fmaxf(a, b) / fminf(a, b) - 1e-4f), (float)t.anisotropy);
    float level = log2f(fmaxf(a, b) / (float)probes);
    float4 sum = {0, 0, 0, 0};
    for (int i = 1; i <= probes; ++i) {
        float at = (float)i / (float)(probes + 1) - 0.5f;
        float4 one = tex2DLayeredLod<T>(object, x + longer.x * at, y + longer.y * at, layer, level);
        sum = {sum.x + one.x / probes, sum.y + one.y / probes, sum.z + one.z / probes, sum.w + one.w / probes};
    }
    return sum;
}

#pragma GCC visibility pop
