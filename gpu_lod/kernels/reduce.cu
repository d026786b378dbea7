// All levels of a chain in one launch, after AMD's FidelityFX SPD.
//
// A block reads a tile of 64 x 64 texels of a plane and makes its six levels in shared memory. The block that is the last
// of its plane to finish makes the levels below from the sixth, six at a time, in the same way.
//
// At an odd side the filter is three texels wide, so outputs of neighbouring tiles share inputs: a block makes what it
// owns and, to the right and below, what its coarser outputs need of its neighbours' (up to 63 texels a level's side).
// What it does not own it does not write, so no two blocks write the same element.
//
// EVEN is defined for sides that are even at the first six levels: then tiles share nothing, and a thread makes two levels
// at a time of 4 x 4 texels, which it reads at once. A tile takes little more than the time of one read.
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
#ifndef LEAST_BLOCKS    // of a multiprocessor, that registers suffice for
#define LEAST_BLOCKS 4
#endif

struct Chain {
    const element* source;  // planes [planes, height, width], level 0
    element* packed;        // of all levels below
    float* wide;            // of levels 6, 12, ... of means of small types, unrounded
    unsigned* finished;     // tiles of each plane that are done; zero at the start, and again at the end
    unsigned long long first[MOST_LEVELS];       // of each level in `packed`
    unsigned long long first_wide[MOST_LEVELS];  // of each level in `wide`
    int height, width, levels;                   // levels: level 0 included
    int tiles_x, tiles_y;
    int fours;  // rows are whole groups of four elements, and begin at one; EVEN takes nothing else
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

__device__ __forceinline__ FromPlane plane_of(const Chain& c, unsigned plane) {
    return {c.source + plane * ((unsigned long long)c.height * c.width), c.width};
}

// A level that this launch made.
#ifdef KEEP_WIDE
typedef FromWide FromMade;
#else
typedef FromLevel FromMade;
#endif
__device__ __forceinline__ FromMade made_of(const Chain& c, unsigned plane, int index) {
    int height = side_of_level(c.height, index), width = side_of_level(c.width, index);
    unsigned long long above = plane * ((unsigned long long)height * width);
#ifdef KEEP_WIDE
    return {c.wide + c.first_wide[index] + above, width};
#else
    return {c.packed + c.first[index] + above, width};
#endif
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

// A level of a plane. The last one of a group is kept unrounded, if there are more.
__device__ __forceinline__ Level level_of(const Chain& c, unsigned plane, int index, bool last_of_group) {
    int height = side_of_level(c.height, index), width = side_of_level(c.width, index);
    unsigned long long area = (unsigned long long)height * width;
    Level level = {c.packed + c.first[index] + plane * area, nullptr, width};
#ifdef KEEP_WIDE
    if (last_of_group && index + 1 < c.levels) level.wide = c.wide + c.first_wide[index] + plane * area;
#endif
    return level;
}

// Level k of a tile, into shared memory and, what is owned, into its level.
template <class From>
__device__ void make_level(const From& from, const Side& down, const Side& right, int k, Value* tile, int stride,
                           const Level& level) {
    int height = down.n[k - 1], top = down.begin[k], own_y = down.own[k], bottom = down.end[k];
    int width = right.n[k - 1], left = right.begin[k], own_x = right.own[k], end = right.end[k];
    int columns = end - left, many = (bottom - top) * columns;
    // Threads in a row, over rows of any length. i / columns is exact for i below 63 * 63 and at most 63 columns.
    int reciprocal = (1 << 18) / max(columns, 1) + 1;
    for (int i = (int)threadIdx.x; i < many; i += THREADS) {
        int row = (int)((unsigned)i * (unsigned)reciprocal >> 18), y = top + row, x = left + i - row * columns;
        Value value = footprint(from, y, x, height, width);
        tile[row * stride + x - left] = value;
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
        Level level = level_of(c, plane, base + k, k == GROUP);
        Value* target = k % 2 ? odd : even;
        int stride = k % 2 ? TILE : TILE / 2;
        if (k > 1) {
            FromShared from = {k % 2 ? even : odd, k % 2 ? TILE / 2 : TILE, down.begin[k - 1], right.begin[k - 1]};
            make_level(from, down, right, k, target, stride, level);
        } else if (base == 0) {
            if (c.fours) make_first_level(plane_of(c, plane), down, right, target, stride, level);
            else make_level(plane_of(c, plane), down, right, 1, target, stride, level);
        } else {
            make_level(made_of(c, plane, base), down, right, 1, target, stride, level);
        }
        __syncthreads();
    }
}

#ifdef EVEN
__device__ __forceinline__ Value quarter(Value a, Value b, Value c, Value d) { return two(two(a, b), two(c, d)); }

// What a thread reads of a tile whose sides are even: a square of 4 x 4, or of 2 x 2, that begins at (y, x).
__device__ __forceinline__ void read_square(const FromPlane& from, int y, int x, Value square[4][4]) {
    Four rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = *(const Four*)(from.plane + (unsigned long long)(y + i) * from.width + x);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) square[i][j] = load(rows[i].at[j]);
}

template <class From> __device__ __forceinline__ void read_square(const From& from, int y, int x, Value square[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) square[i][j] = from.at(y + i, x + j);
}

// Two levels of a tile of height x width texels, from level `below` of the chain, which `from` reads: its texel (0, 0) is
// (top, left) there. The second goes to `target`, rows of a quarter of the width, for the next two.
template <class From>
__device__ __forceinline__ void make_two_levels(const Chain& c, unsigned plane, int below, const From& from, int top,
                                                int left, int height, int width, bool last_of_group, Value* target) {
    int columns = width / 4, squares = height / 4 * columns;
    if ((int)threadIdx.x < squares) {
        int row = (int)threadIdx.x / columns, y = top / 4 + row, x = left / 4 + (int)threadIdx.x - row * columns;
        Value square[4][4], half[2][2];
        read_square(from, 4 * y, 4 * x, square);
        Level level = level_of(c, plane, below + 1, false);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                half[i][j] = quarter(square[2 * i][2 * j], square[2 * i][2 * j + 1], square[2 * i + 1][2 * j],
                                     square[2 * i + 1][2 * j + 1]);
            Two pair = {{store(half[i][0]), store(half[i][1])}};
            *(Two*)(level.plane + (unsigned long long)(2 * y + i) * level.width + 2 * x) = pair;
        }
        Value value = quarter(half[0][0], half[0][1], half[1][0], half[1][1]);
        write(level_of(c, plane, below + 2, last_of_group), y, x, value);
        target[threadIdx.x] = value;
    }
    __syncthreads();
}

// Levels base + 1 to base + `levels` of a tile, all of whose sides are even up there: a whole one, or all of a level.
template <class From>
__device__ void make_even_tile(const Chain& c, unsigned plane, int base, const From& from, int tile_y, int tile_x,
                               int levels, Value* even, Value* odd) {
    int height = min(side_of_level(c.height, base), TILE), width = min(side_of_level(c.width, base), TILE);
    int top = tile_y * TILE, left = tile_x * TILE;
    make_two_levels(c, plane, base, from, top, left, height, width, levels == 2, even);
    for (int k = 2; k < levels; k += 2) {
        height /= 4;
        width /= 4;
        top /= 4;
        left /= 4;
        FromShared above = {k % 4 ? even : odd, width, top, left};
        if (k + 1 < levels) {
            make_two_levels(c, plane, base + k, above, top, left, height, width, k + 2 == levels, k % 4 ? odd : even);
        } else if ((int)threadIdx.x < height / 2 * (width / 2)) {
            int row = (int)threadIdx.x / (width / 2);
            int y = top / 2 + row, x = left / 2 + (int)threadIdx.x - row * (width / 2);
            write(level_of(c, plane, base + levels, true), y, x,
                  quarter(above.at(2 * y, 2 * x), above.at(2 * y, 2 * x + 1), above.at(2 * y + 1, 2 * x),
                          above.at(2 * y + 1, 2 * x + 1)));
        }
    }
}

// Whether all sides above the last of some levels, from `base` on, are even.
__device__ __forceinline__ bool even_above(const Chain& c, int base, int levels) {
    return levels > 1 && ((side_of_level(c.height, base) | side_of_level(c.width, base)) & ((1 << levels) - 1)) == 0;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS) reduce(const Chain c) {
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
            if (threadIdx.x == 0) {
                last = atomicAdd(c.finished + plane, 1u) == tiles - 1;
                if (last) c.finished[plane] = 0;
            }
            __syncthreads();
            if (!last) return;
            __threadfence();
        }
        if (base > 0) {
            begin_y = begin_x = 0;
            end_y = (side_of_level(c.height, base) + TILE - 1) / TILE;
            end_x = (side_of_level(c.width, base) + TILE - 1) / TILE;
        }
#ifdef EVEN
        int levels = min(c.levels - 1 - base, GROUP);
        bool even_sides = even_above(c, base, levels);
#endif
        for (int y = begin_y; y < end_y; ++y)
            for (int x = begin_x; x < end_x; ++x)
#ifdef EVEN
                if (base == 0) make_even_tile(c, plane, base, plane_of(c, plane), y, x, levels, even, odd);
                else if (even_sides) make_even_tile(c, plane, base, made_of(c, plane, base), y, x, levels, even, odd);
                else
#endif
                    make_tile(c, plane, base, y, x, even, odd, down, right);
    }
}
