// All levels of a chain in one launch, after AMD's FidelityFX SPD.
//
// A block reads a tile of 64 x 64 texels of a plane and makes its six levels in shared memory. The block that is the last
// of its plane to finish makes the levels below from the sixth, six at a time, in the same way.
//
// At an odd side the filter is three texels wide, so outputs of neighbouring tiles share inputs: a block makes what it
// owns and, to the right and below, what its coarser outputs need of its neighbours' (up to 63 texels a level's side).
// What it does not own it does not write, so no two blocks write the same element.
//
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32; one of REDUCE_MEAN, REDUCE_MAX, REDUCE_MIN.
#ifdef REDUCE_MEAN
#include "mean.cuh"
#else
#include "extreme.cuh"
#endif

#define THREADS 256
#define GROUP 6         // levels that a tile gives
#define TILE (1 << GROUP)
#define MOST_LEVELS 32

struct Chain {
    const element* source;  // planes [planes, height, width], level 0
    element* packed;        // of all levels below
    float* wide;            // of levels 6, 12, ... of means of small types, unrounded
    unsigned* finished;     // tiles of each plane that are done; zero at the start
    unsigned long long first[MOST_LEVELS];       // of each level in `packed`
    unsigned long long first_wide[MOST_LEVELS];  // of each level in `wide`
    int height, width, levels;                   // levels: level 0 included
    int tiles_x, tiles_y;
    int fours;  // rows are whole groups of four elements, and begin at one
};

// One side of a tile, at each of its levels.
struct Side {
    int n[GROUP + 1];      // texels of each level, 0 the one that is read
    int begin[GROUP + 1];  // the tile's texels: from here
    int own[GROUP + 1];    // up to here they are its own,
    int end[GROUP + 1];    // and up to here it makes them
};

__device__ int side_of_level(int n, int level) { return max(n >> level, 1); }

__device__ void span(Side& side, int n, int tile, int base, int levels) {
    for (int k = levels; k >= 0; --k) {
        side.n[k] = side_of_level(n, base + k);
        side.begin[k] = tile << (GROUP - k);
        side.own[k] = max(min((tile + 1) << (GROUP - k), side.n[k]), side.begin[k]);
        int needed = side.begin[k];
        if (k < levels && side.end[k + 1] > side.begin[k + 1])
            needed = side.n[k] == 1 ? 1 : 2 * side.end[k + 1] + side.n[k] % 2;
        side.end[k] = max(side.own[k], needed);
    }
}

// Where texels are read: at (y, x) of a level.
struct FromPlane {
    const element* plane;
    int width;
    __device__ __forceinline__ Value at(int y, int x) const { return load(plane[(unsigned long long)y * width + x]); }
};

// Written by other blocks of this launch, so never through a cache that does not see it.
struct FromLevel {
    const volatile element* plane;
    int width;
    __device__ __forceinline__ Value at(int y, int x) const { return load(plane[(unsigned long long)y * width + x]); }
};

#ifdef KEEP_WIDE
struct FromWide {
    const volatile float* plane;
    int width;
    __device__ __forceinline__ Value at(int y, int x) const { return plane[(unsigned long long)y * width + x]; }
};
#endif

struct FromShared {
    const Value* tile;
    int stride, begin_y, begin_x;
    __device__ __forceinline__ Value at(int y, int x) const { return tile[(y - begin_y) * stride + x - begin_x]; }
};

template <class From> __device__ __forceinline__ Value across(const From& from, int y, int x, int n) {
    if (n == 1) return from.at(y, 0);
    Value a = from.at(y, 2 * x), b = from.at(y, 2 * x + 1);
    return n % 2 ? three(a, b, from.at(y, 2 * x + 2), x, n) : two(a, b);
}

template <class From>
__device__ __forceinline__ Value footprint(const From& from, int y, int x, int height, int width) {
    if (height == 1) return across(from, 0, x, width);
    Value a = across(from, 2 * y, x, width), b = across(from, 2 * y + 1, x, width);
    return height % 2 ? three(a, b, across(from, 2 * y + 2, x, width), y, height) : two(a, b);
}

struct Level {
    element* plane;
    float* wide;  // or null
    int width;
};

__device__ __forceinline__ void write(const Level& level, int y, int x, Value value) {
    unsigned long long index = (unsigned long long)y * level.width + x;
    level.plane[index] = store(value);
#ifdef KEEP_WIDE
    if (level.wide) level.wide[index] = value;
#endif
}

// Level k of a tile, into shared memory and, what is owned, into its level.
template <class From>
__device__ void make_level(const From& from, const Side& down, const Side& right, int k, Value* tile, int stride,
                           const Level& level) {
    int height = down.n[k - 1], top = down.begin[k], own_y = down.own[k], bottom = down.end[k];
    int width = right.n[k - 1], left = right.begin[k], own_x = right.own[k], end = right.end[k];
    for (int y = top + (int)threadIdx.x / 32; y < bottom; y += THREADS / 32)
        for (int x = left + (int)threadIdx.x % 32; x < end; x += 32) {
            Value value = footprint(from, y, x, height, width);
            tile[(y - top) * stride + x - left] = value;
            if (y < own_y && x < own_x) write(level, y, x, value);
        }
}

// Level 1 where rows are whole groups of four: two neighbours from each row of fours.
__device__ void make_first_level(const FromPlane& from, const Side& down, const Side& right, Value* tile, int stride,
                                 const Level& level) {
    int height = down.n[0], top = down.begin[1], own_y = down.own[1], bottom = down.end[1];
    int left = right.begin[1], own_x = right.own[1], end = right.end[1];
    int rows = height == 1 ? 1 : 2 + height % 2;
    for (int y = top + (int)threadIdx.x / 16; y < bottom; y += THREADS / 16)
        for (int x = left + (int)threadIdx.x % 16 * 2; x < end; x += 32) {
            Value first[3], next[3];
#pragma unroll
            for (int row = 0; row < 3; ++row)
                if (row < rows) {
                    unsigned long long at = (unsigned long long)(height == 1 ? 0 : 2 * y + row) * from.width + 2 * x;
                    Four four = *(const Four*)(from.plane + at);
                    first[row] = two(load(four.at[0]), load(four.at[1]));
                    next[row] = two(load(four.at[2]), load(four.at[3]));
                }
            Value a = first[0], b = next[0];
            if (rows == 2) {
                a = two(a, first[1]);
                b = two(b, next[1]);
            } else if (rows == 3) {
                a = three(a, first[1], first[2], y, height);
                b = three(b, next[1], next[2], y, height);
            }
            Value* target = tile + (y - top) * stride + x - left;
            target[0] = a;
            target[1] = b;
            if (y < own_y && x < own_x) {
                Two pair = {{store(a), store(b)}};
                *(Two*)(level.plane + (unsigned long long)y * level.width + x) = pair;
            }
        }
}

// Levels base + 1 to base + 6 of a tile of level base.
__device__ void make_tile(const Chain& c, unsigned plane, int base, int tile_y, int tile_x, Value* even, Value* odd,
                          Side& down, Side& right) {
    int levels = min(c.levels - 1 - base, GROUP);
    if (threadIdx.x == 0) span(down, c.height, tile_y, base, levels);
    if (threadIdx.x == 32) span(right, c.width, tile_x, base, levels);
    __syncthreads();
    for (int k = 1; k <= levels; ++k) {
        int height = down.n[k], width = right.n[k];
        unsigned long long area = (unsigned long long)height * width;
        Level level = {c.packed + c.first[base + k] + plane * area, nullptr, width};
#ifdef KEEP_WIDE
        if (k == GROUP && base + k + 1 < c.levels) level.wide = c.wide + c.first_wide[base + k] + plane * area;
#endif
        Value* target = k % 2 ? odd : even;
        int stride = k % 2 ? TILE : TILE / 2;
        if (k > 1) {
            FromShared from = {k % 2 ? even : odd, k % 2 ? TILE / 2 : TILE, down.begin[k - 1], right.begin[k - 1]};
            make_level(from, down, right, k, target, stride, level);
        } else {
            unsigned long long above = plane * ((unsigned long long)down.n[0] * right.n[0]);
            if (base == 0) {
                FromPlane from = {c.source + above, right.n[0]};
                if (c.fours) make_first_level(from, down, right, target, stride, level);
                else make_level(from, down, right, 1, target, stride, level);
            } else {
#ifdef KEEP_WIDE
                FromWide from = {c.wide + c.first_wide[base] + above, right.n[0]};
#else
                FromLevel from = {c.packed + c.first[base] + above, right.n[0]};
#endif
                make_level(from, down, right, 1, target, stride, level);
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) reduce(const Chain c) {
    __shared__ Value odd[TILE * TILE];           // levels 1, 3, 5 of a tile
    __shared__ Value even[TILE / 2 * TILE / 2];  // levels 2, 4, 6
    __shared__ Side down, right;
    __shared__ int last;
    unsigned tiles = (unsigned)(c.tiles_x * c.tiles_y);
    unsigned plane = blockIdx.x / tiles, tile = blockIdx.x - plane * tiles;
    int begin_y = (int)tile / c.tiles_x, begin_x = (int)tile % c.tiles_x, end_y = begin_y + 1, end_x = begin_x + 1;
    for (int base = 0; base < c.levels - 1; base += GROUP) {
        if (base == GROUP) {
            __threadfence();  // what this thread wrote is there before the count says so
            __syncthreads();
            if (threadIdx.x == 0) last = atomicAdd(c.finished + plane, 1u) == tiles - 1;
            __syncthreads();
            if (!last) return;
            __threadfence();
        }
        if (base > 0) {
            begin_y = begin_x = 0;
            end_y = (side_of_level(c.height, base) + TILE - 1) / TILE;
            end_x = (side_of_level(c.width, base) + TILE - 1) / TILE;
        }
        for (int y = begin_y; y < end_y; ++y)
            for (int x = begin_x; x < end_x; ++x) make_tile(c, plane, base, y, x, even, odd, down, right);
    }
}
