// Levels of a chain, up to all of them in one launch, after AMD's FidelityFX SPD.
//
// A block reads a tile of 64 x 64 texels of a plane and makes up to six levels of it in shared memory. Where the last of
// them fits a tile, the block of each plane that is the last to finish makes those below it in the same way.
//
// At an odd side the filter is three texels wide, so outputs of neighbouring tiles share inputs: a block makes what it
// owns and, to the right and below, what its coarser outputs need of its neighbours'. What it does not own it does not
// write, so no two blocks write the same element. The more levels, the more is made twice: of six levels with odd sides
// four times as much, of three a quarter more. Where a level is larger than a tile the host asks for three.
//
// EVEN is defined where the sides above the last level of a tile are even: then tiles share nothing, and a thread makes
// two levels at a time of 4 x 4 texels, which it reads at once. A tile takes little more than the time of one read.
//
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32; one of REDUCE_MEAN, REDUCE_MAX, REDUCE_MIN.
#ifdef REDUCE_MEAN
#include "mean.cuh"
#else
#include "extreme.cuh"
#endif

#define THREADS 256
#define GROUP 6         // levels that a tile gives at most
#define TILE (1 << GROUP)
#define MOST_LEVELS 32
#ifndef LEAST_BLOCKS    // of a multiprocessor, that registers suffice for
#ifdef EVEN
#define LEAST_BLOCKS 6
#else
#define LEAST_BLOCKS 4
#endif
#endif
#ifdef EVEN             // what is left of odd sides is a tile a plane
#define ROWS_AT_ONCE 1
#else
#define ROWS_AT_ONCE 2
#endif

struct Chain {
    const element* source;  // planes [planes, height, width], level 0
    element* packed;        // of all levels below
    float* wide;            // of levels that are read again, of means of small types, unrounded
    unsigned* finished;     // tiles of each plane that are done; zero at the start, and again at the end
    unsigned long long first[MOST_LEVELS];       // of each level in `packed`
    unsigned long long first_wide[MOST_LEVELS];  // of each level in `wide`, or NOT_KEPT
    int height, width, levels;                   // levels: level 0 included
    int base, group;                             // tiles are of level `base`, and give `group` levels below it
    int tiles_x, tiles_y;
    int finish;  // the last block of a plane makes the levels below those, in one tile
    int fours;   // rows of level 0 are whole groups of four elements, and begin at one; EVEN takes nothing else there
};
#define NOT_KEPT 0xffffffffffffffffull

// One side of a tile, at each of its levels.
struct Side {
    int n[GROUP + 1];      // texels of each level, 0 the one that is read
    int begin[GROUP + 1];  // the tile's texels: from here
    int own[GROUP + 1];    // up to here they are its own,
    int end[GROUP + 1];    // and up to here it makes them
    float part[GROUP + 1]; // 1 / n
};

__device__ int side_of_level(int n, int level) { return max(n >> level, 1); }

__device__ void span(Side& side, int n, int tile, int base, int levels) {
    for (int k = levels; k >= 0; --k) {
        side.n[k] = side_of_level(n, base + k);
        side.part[k] = 1.0f / (float)side.n[k];
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

template <class From>
__device__ __forceinline__ Value across(const From& from, int y, int x, int n, const Shares& shares) {
    if (n == 1) return from.at(y, 0);
    Value a = from.at(y, 2 * x), b = from.at(y, 2 * x + 1);
    return n % 2 ? three(a, b, from.at(y, 2 * x + 2), shares) : two(a, b);
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

// A level of a plane.
__device__ __forceinline__ Level level_of(const Chain& c, unsigned plane, int index) {
    int height = side_of_level(c.height, index), width = side_of_level(c.width, index);
    unsigned long long area = (unsigned long long)height * width;
    Level level = {c.packed + c.first[index] + plane * area, nullptr, width};
#ifdef KEEP_WIDE
    if (c.first_wide[index] != NOT_KEPT) level.wide = c.wide + c.first_wide[index] + plane * area;
#endif
    return level;
}

// Level k of a tile, into shared memory and, what is owned, into its level. A thread makes a piece of a column from top to
// bottom: of an odd height rows below one another share one.
template <class From>
__device__ void make_level(const From& from, const Side& down, const Side& right, int k, Value* tile, int stride,
                           const Level& level) {
    int height = down.n[k - 1], top = down.begin[k], own_y = down.own[k], bottom = down.end[k];
    int width = right.n[k - 1], left = right.begin[k], own_x = right.own[k], end = right.end[k];
    int columns = end - left, rows = bottom - top;
    if (columns < 1 || rows < 1) return;
    int pieces = THREADS / columns, piece = (rows + pieces - 1) / pieces;
    int which = (int)threadIdx.x / columns, x = left + (int)threadIdx.x - which * columns;
    int first = top + which * piece, last = min(first + piece, bottom);
    if (which >= pieces || first >= last) return;
    Shares by_width = shares(x, width, right.part[k - 1]);
    bool owned = x < own_x;
    Value* target = tile + x - left;
    if (height % 2 && height > 1) {
        Value a = across(from, 2 * first, x, width, by_width);
#pragma unroll ROWS_AT_ONCE
        for (int y = first; y < last; ++y) {
            Value b = across(from, 2 * y + 1, x, width, by_width), c = across(from, 2 * y + 2, x, width, by_width);
            Value value = three(a, b, c, shares(y, height, down.part[k - 1]));
            target[(y - top) * stride] = value;
            if (owned && y < own_y) write(level, y, x, value);
            a = c;
        }
    } else {
#pragma unroll ROWS_AT_ONCE
        for (int y = first; y < last; ++y) {
            Value value = across(from, height == 1 ? 0 : 2 * y, x, width, by_width);
            if (height > 1) value = two(value, across(from, 2 * y + 1, x, width, by_width));
            target[(y - top) * stride] = value;
            if (owned && y < own_y) write(level, y, x, value);
        }
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
                Shares by_height = shares(y, height, down.part[0]);
                a = three(a, first[1], first[2], by_height);
                b = three(b, next[1], next[2], by_height);
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

// Levels base + 1 to base + `levels` of a tile of level base.
__device__ void make_tile(const Chain& c, unsigned plane, int base, int levels, int tile_y, int tile_x, Value* even,
                          Value* odd, Side& down, Side& right) {
    if (threadIdx.x == 0) span(down, c.height, tile_y, base, levels);
    if (threadIdx.x == 32) span(right, c.width, tile_x, base, levels);
    __syncthreads();
    for (int k = 1; k <= levels; ++k) {
        Level level = level_of(c, plane, base + k);
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

struct Quarters {
    Two stored[2];  // level k + 1 of a square, by rows
    Value whole;    // level k + 2
};

// Of a square of 4 x 4 texels that begins at (y, x).
template <class From> __device__ __forceinline__ Quarters quarters(const From& from, int y, int x) {
    Value square[4][4], half[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) square[i][j] = from.at(y + i, x + j);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            half[i][j] = quarter(square[2 * i][2 * j], square[2 * i][2 * j + 1], square[2 * i + 1][2 * j],
                                 square[2 * i + 1][2 * j + 1]);
    Quarters q = {{{{store(half[0][0]), store(half[0][1])}}, {{store(half[1][0]), store(half[1][1])}}},
                  quarter(half[0][0], half[0][1], half[1][0], half[1][1])};
    return q;
}

// Rows of an image: four elements at once.
__device__ __forceinline__ Quarters quarters(const FromPlane& from, int y, int x) {
    const element* at = from.plane + (unsigned long long)y * from.width + x;
#if defined(UINT8) && defined(REDUCE_MEAN)
    // Sums of counts are exact, as their means in fp32 are: four bytes of a word are added at once.
    unsigned rows[4], sums[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = *(const unsigned*)(at + (unsigned long long)i * from.width);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sums[i][0] = __dp4a(rows[2 * i], 0x00000101u, __dp4a(rows[2 * i + 1], 0x00000101u, 0u));
        sums[i][1] = __dp4a(rows[2 * i], 0x01010000u, __dp4a(rows[2 * i + 1], 0x01010000u, 0u));
    }
    Quarters q;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)  // to the nearest, ties to even
            q.stored[i].at[j] = (element)((sums[i][j] + 1u + (sums[i][j] >> 2 & 1u)) >> 2);
    q.whole = (float)(sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1]) * 0.0625f;
    return q;
#else
    struct {
        Four rows[4];
        __device__ __forceinline__ Value at(int i, int j) const { return load(rows[i].at[j]); }
    } square;
#pragma unroll
    for (int i = 0; i < 4; ++i) square.rows[i] = *(const Four*)(at + (unsigned long long)i * from.width);
    return quarters(square, 0, 0);
#endif
}

// Two levels of a tile of height x width texels, from level `below` of the chain, which `from` reads: its texel (0, 0) is
// (top, left) there. The second goes to `target`, rows of a quarter of the width, for the next two.
template <class From>
__device__ __forceinline__ void make_two_levels(const Chain& c, unsigned plane, int below, const From& from, int top,
                                                int left, int height, int width, Value* target) {
    int columns = width / 4, squares = height / 4 * columns;
    if ((int)threadIdx.x < squares) {
        int row = (int)threadIdx.x / columns, y = top / 4 + row, x = left / 4 + (int)threadIdx.x - row * columns;
        Quarters q = quarters(from, 4 * y, 4 * x);
        Level level = level_of(c, plane, below + 1);
        element* at = level.plane + (unsigned long long)(2 * y) * level.width + 2 * x;
        *(Two*)at = q.stored[0];
        *(Two*)(at + level.width) = q.stored[1];
        write(level_of(c, plane, below + 2), y, x, q.whole);
        target[threadIdx.x] = q.whole;
    }
    __syncthreads();
}

// Levels base + 1 to base + `levels` of a tile, two at least.
template <class From>
__device__ void make_even_tile(const Chain& c, unsigned plane, int base, int levels, const From& from, int tile_y,
                               int tile_x, Value* even, Value* odd) {
    int top = tile_y * TILE, left = tile_x * TILE;
    int height = min(side_of_level(c.height, base) - top, TILE), width = min(side_of_level(c.width, base) - left, TILE);
    make_two_levels(c, plane, base, from, top, left, height, width, even);
    for (int k = 2; k < levels; k += 2) {
        height /= 4;
        width /= 4;
        top /= 4;
        left /= 4;
        FromShared above = {k % 4 ? even : odd, width, top, left};
        if (k + 1 < levels) {
            make_two_levels(c, plane, base + k, above, top, left, height, width, k % 4 ? odd : even);
        } else if ((int)threadIdx.x < height / 2 * (width / 2)) {
            int row = (int)threadIdx.x / (width / 2);
            int y = top / 2 + row, x = left / 2 + (int)threadIdx.x - row * (width / 2);
            write(level_of(c, plane, base + levels), y, x,
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
    int tile_y = (int)tile / c.tiles_x, tile_x = (int)tile - tile_y * c.tiles_x;
#ifdef EVEN
    if (c.base == 0) make_even_tile(c, plane, 0, c.group, plane_of(c, plane), tile_y, tile_x, even, odd);
    else make_even_tile(c, plane, c.base, c.group, made_of(c, plane, c.base), tile_y, tile_x, even, odd);
#else
    make_tile(c, plane, c.base, c.group, tile_y, tile_x, even, odd, down, right);
#endif
    if (!c.finish) return;
    __threadfence();  // what this thread wrote is there before the count says so
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(c.finished + plane, 1u) == tiles - 1;
        if (last) c.finished[plane] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    int base = c.base + c.group, levels = c.levels - 1 - base;
#ifdef EVEN
    if (even_above(c, base, levels)) {
        make_even_tile(c, plane, base, levels, made_of(c, plane, base), 0, 0, even, odd);
        return;
    }
#endif
    make_tile(c, plane, base, levels, 0, 0, even, odd, down, right);
}
