// Levels of a chain, up to all of them in one launch, after AMD's FidelityFX SPD.
//
// A block reads a tile of a plane and makes up to six levels of it in shared memory. Where the last of them has 128
// texels a side at most, the block of each plane that is the last to finish makes those below it in the same way.
//
// At an odd side the filter is three texels wide, so outputs of neighbouring tiles share inputs: a block makes what it
// owns and, to the right and below, what its coarser outputs need of its neighbours'. What it does not own it does not
// write, so no two blocks write the same element. The more levels, the more is made twice: the host asks for three or
// four of a larger image. Tiles own so much that whatever they make of level k fits 2^(window - k) columns: then each
// thread has a column, and there is nothing to divide by.
//
// EVEN is defined where the image's sides, down to the last level of a tile, are even: then tiles share nothing, and a
// thread makes two levels at a time of 4 x 4 texels, which it reads at once. A block may make several tiles, one after
// the other: it reads the next one before it makes this one, and makes the levels from 3 on of many tiles together.
//
// One of UINT8, FLOAT16, BFLOAT16, FLOAT32; one of REDUCE_MEAN, REDUCE_MAX, REDUCE_MIN.
#ifdef REDUCE_MEAN
#include "mean.cuh"
#else
#include "extreme.cuh"
#endif

#define THREADS 256
#define THREADS_LOG2 8
#define GROUP 6         // levels that a tile gives at most, and one more where it is all that there is of a plane
#define TILE (1 << GROUP)
#define MOST_LEVELS 32
// Blocks of a multiprocessor that registers suffice for; chain.py has those of EVEN too.
#ifdef EVEN
#define LEAST_BLOCKS 4
#else
#define LEAST_BLOCKS 3
#endif
#define ROWS_AT_ONCE 4  // that a thread makes of texels which it reads at once

struct Chain {
    const element* source;  // planes [planes, height, width], level 0
    element* packed;        // of all levels below
    float* wide;            // of levels that are read again, of means of small types, unrounded
    unsigned* finished;     // tiles of each plane that are done; zero at the start, and again at the end
    unsigned long long first[MOST_LEVELS];       // of each level in `packed`
    unsigned long long first_wide[MOST_LEVELS];  // of each level in `wide`, or NOT_KEPT
    float part_y[MOST_LEVELS], part_x[MOST_LEVELS];  // of each level, 1 / side
    // If EVEN: elements from behind a row of tiles to the next row, at levels 0 to 2, and from behind a plane's to the
    // next plane.
    long long to_row[3], to_plane[3];
    int height, width, levels;                   // levels: level 0 included
    int base, group;                             // tiles are of level `base`, and give `group` levels below it
    int window, own;  // unless EVEN: see above; texels of the last of these levels that a tile has for its own
    int tiles_x, tiles_y;
    unsigned tiles, at_once;  // of all planes; that a block makes, more than one if EVEN
    int finish;  // the last block of a plane makes the levels below those, in one tile
    int fours;   // rows of level 0 are whole groups of four elements, and begin at one; EVEN takes nothing else
};
#define NOT_KEPT 0xffffffffffffffffull

// One side of a tile, at each of its levels.
struct Side {
    int n[GROUP + 2];      // texels of each level, 0 the one that is read
    int begin[GROUP + 2];  // the tile's texels: from here
    int own[GROUP + 2];    // up to here they are its own,
    int end[GROUP + 2];    // and up to here it makes them
    float part[GROUP + 2]; // 1 / n
};

__device__ int side_of_level(int n, int level) { return max(n >> level, 1); }

// Level k of a side, from the last one upwards: what its outputs need of it.
__device__ __forceinline__ void span(const Chain& c, Side& side, bool down, int own, int tile, int base, int levels,
                                     int k) {
    int all = down ? c.height : c.width, n = 0, begin = 0, mine = 0, end = 0;
    for (int j = levels; j >= k; --j) {
        bool wanted = end > begin;  // any of the level below
        n = side_of_level(all, base + j);
        begin = tile * own << (levels - j);
        mine = max(min(begin + (own << (levels - j)), n), begin);
        end = max(mine, wanted ? (n == 1 ? 1 : 2 * end + n % 2) : begin);
    }
    side.n[k] = n, side.begin[k] = begin, side.own[k] = mine, side.end[k] = end;
    side.part[k] = down ? c.part_y[base + k] : c.part_x[base + k];
}

// Texels of a level, row by row: as an image has them; as levels of an earlier launch have them; as levels have them that
// other blocks of this launch may have written, so never through a cache that does not see it; and in shared memory.
// Nobody writes the first two meanwhile, which the compiler is told, or it would not even know what memory they are in.
struct OfImage {
    typedef const element* Pointer;
    static __device__ __forceinline__ Value at(const element& texel) { return load(__ldg(&texel)); }
};
#ifdef KEEP_WIDE
struct OfEarlier {
    typedef const float* Pointer;
    static __device__ __forceinline__ Value at(const float& texel) { return __ldg(&texel); }
};
#else
typedef OfImage OfEarlier;
#endif
struct OfLevel {
#ifdef KEEP_WIDE
    typedef const volatile float* Pointer;
    static __device__ __forceinline__ Value at(const volatile float& texel) { return texel; }
#else
    typedef const volatile element* Pointer;
    static __device__ __forceinline__ Value at(const volatile element& texel) { return load(texel); }
#endif
};
struct OfTile {
    typedef const Value* Pointer;
    static __device__ __forceinline__ Value at(const Value& texel) { return texel; }
};
template <class Texels> struct From {
    typename Texels::Pointer first;  // of the tile
    int width;                       // from row to row
};

// A level that this launch made, or one before it.
template <class Texels>
__device__ __forceinline__ From<Texels> made_of(const Chain& c, unsigned plane, int index) {
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

__device__ __forceinline__ void write(const Level& level, element* at, Value value) {
    *at = store(value);
#ifdef KEEP_WIDE
    if (level.wide) level.wide[at - level.plane] = value;
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

// What a thread makes of a level: a piece of a column from top to bottom. Of an odd height rows below one another share
// one that they are made of.
struct Piece {
    int x, first, last;  // rows from first to before last
};

__device__ __forceinline__ Piece piece_of(const Side& down, const Side& right, int window, int k) {
    int columns = window - k, pieces = THREADS >> columns;  // of columns the logarithm
    int length = (down.end[k] - down.begin[k] + pieces - 1) >> (THREADS_LOG2 - columns);
    Piece p;
    p.x = right.begin[k] + ((int)threadIdx.x & ((1 << columns) - 1));
    p.first = down.begin[k] + ((int)threadIdx.x >> columns) * length;
    p.last = p.x < right.end[k] ? min(p.first + length, down.end[k]) : p.first;
    return p;
}

// A column's rows, one after the other, of texels both of whose sides are longer than one. Which taps there are is told
// when this is compiled, and where they are moves on from row to row: to find each by itself would take several times
// what making a level does.
template <class Texels, int AT_ONCE, bool ODD_ROWS, bool ODD_COLUMNS> struct Column {
    typename Texels::Pointer at;
    int width;  // from row to row
    Shares by_width;
    int height;  // of the level that is read
    float part;  // 1 / height
    Value above;
    Value* target;
    int stride;
    element* stored;

    __device__ __forceinline__ Value across() {
        Value a = Texels::at(at[0]), b = Texels::at(at[1]);
        Value made = ODD_COLUMNS ? three(a, b, Texels::at(at[1 + ODD_COLUMNS]), by_width) : two(a, b);
        at += width;
        return made;
    }

    // AT_ONCE rows from y on, or those before `last`; before `owned` they are written. All that they are made of is
    // asked for before any of them is stored.
    template <bool ALL> __device__ __forceinline__ void make(const Level& level, int y, int last, int owned) {
        Value rows[2 * AT_ONCE];
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; ++i)
            if (ALL || y + i / 2 < last) rows[i] = across();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (ALL || y + i < last) {
                Value value = two(rows[2 * i], rows[2 * i + 1]);
                if (ODD_ROWS) value = three(above, rows[2 * i], rows[2 * i + 1], shares(y + i, height, part));
                above = rows[2 * i + 1];
                target[i * stride] = value;
                if (y + i < owned) write(level, stored, value);
                stored += level.width;
            }
        target += AT_ONCE * stride;
    }
};

// Level k of a piece, of texels from its first one on, into shared memory and, what is owned, into its level.
template <class Texels, int AT_ONCE, bool ODD_ROWS, bool ODD_COLUMNS>
__device__ __forceinline__ void make_piece(typename Texels::Pointer at, int width, const Piece& p, const Side& down,
                                           const Side& right, int k, Value* target, int stride, const Level& level) {
    int owned = p.x < right.own[k] ? down.own[k] : p.first, y = p.first;
    Column<Texels, AT_ONCE, ODD_ROWS, ODD_COLUMNS> column = {
        at,     width,  shares(p.x, right.n[k - 1], right.part[k - 1]), down.n[k - 1], down.part[k - 1], Value(),
        target, stride, level.plane + ((long long)p.first * level.width + p.x)};
    if (ODD_ROWS) column.above = column.across();
    for (; y + AT_ONCE <= p.last; y += AT_ONCE) column.template make<true>(level, y, p.last, owned);
    if (AT_ONCE > 1 && y < p.last) column.template make<false>(level, y, p.last, owned);
}

// The same where one of the sides is 1.
template <class Texels>
__device__ __forceinline__ void make_thin_piece(typename Texels::Pointer at, int width, const Piece& p,
                                                const Side& down, const Side& right, int k, Value* target, int stride,
                                                const Level& level) {
    int rows = min(down.n[k - 1], 2 + down.n[k - 1] % 2), columns = min(right.n[k - 1], 2 + right.n[k - 1] % 2);
    Shares by_width = shares(p.x, right.n[k - 1], right.part[k - 1]);
    for (int y = p.first; y < p.last; ++y) {
        Value made[3];
        for (int i = 0; i < rows; ++i) {
            typename Texels::Pointer texels = at + (long long)(2 * (y - p.first) + i) * width;
            made[i] = Texels::at(texels[0]);
            if (columns == 2) made[i] = two(made[i], Texels::at(texels[1]));
            if (columns == 3) made[i] = three(made[i], Texels::at(texels[1]), Texels::at(texels[2]), by_width);
        }
        Value value = made[0];
        if (rows == 2) value = two(value, made[1]);
        if (rows == 3) value = three(value, made[1], made[2], shares(y, down.n[k - 1], down.part[k - 1]));
        target[(y - p.first) * stride] = value;
        if (p.x < right.own[k] && y < down.own[k])
            write(level, level.plane + ((long long)y * level.width + p.x), value);
    }
}

// Level k of a tile. `from` has the first texel that it is made of.
template <class Texels, int AT_ONCE>
__device__ __forceinline__ void make_level(const From<Texels>& from, const Side& down, const Side& right, int window,
                                           int k, Value* tile, int stride, const Level& level) {
    Piece p = piece_of(down, right, window, k);
    if (p.first >= p.last) return;
    int y = p.first - down.begin[k], x = p.x - right.begin[k], height = down.n[k - 1], width = right.n[k - 1];
    typename Texels::Pointer at = from.first + (long long)(2 * y) * from.width + 2 * x;
    Value* target = tile + y * stride + x;
    bool odd_rows = height % 2, odd_columns = width % 2;
    if (height == 1 || width == 1)
        make_thin_piece<Texels>(at, from.width, p, down, right, k, target, stride, level);
    else if (odd_rows && odd_columns)
        make_piece<Texels, AT_ONCE, true, true>(at, from.width, p, down, right, k, target, stride, level);
    else if (odd_rows)
        make_piece<Texels, AT_ONCE, true, false>(at, from.width, p, down, right, k, target, stride, level);
    else if (odd_columns)
        make_piece<Texels, AT_ONCE, false, true>(at, from.width, p, down, right, k, target, stride, level);
    else
        make_piece<Texels, AT_ONCE, false, false>(at, from.width, p, down, right, k, target, stride, level);
}

#ifndef EVEN
#ifdef FLOAT32
// Level 1 where rows are whole groups of four: two neighbours from each row of fours.
__device__ void make_level_of_fours(const element* plane, int width, const Side& down, const Side& right, Value* tile,
                                    int stride, const Level& level) {
    int height = down.n[0], top = down.begin[1], own_y = down.own[1], bottom = down.end[1];
    int left = right.begin[1], own_x = right.own[1], end = right.end[1];
    int rows = height == 1 ? 1 : 2 + height % 2;
    for (int y = top + (int)threadIdx.x / 16; y < bottom; y += THREADS / 16)
        for (int x = left + (int)threadIdx.x % 16 * 2; x < end; x += 32) {
            Value first[3], next[3];
#pragma unroll
            for (int row = 0; row < 3; ++row)
                if (row < rows) {
                    unsigned long long at = (unsigned long long)(height == 1 ? 0 : 2 * y + row) * width + 2 * x;
                    Four four = *(const Four*)(plane + at);
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
#else
// Columns of level 1 that a thread makes of texels smaller than words, and the words that a row of theirs lies in.
#define RUN (4 / (int)sizeof(element))
#define RUN_WORDS 3
struct alignas(4 * RUN) Values { Value at[RUN]; };

// What makes of a row of texels the values of a run: `by` are the words that it begins in and the next ones, and `shift`
// the bits before it.
#if defined(UINT8) && defined(REDUCE_MEAN) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 610)  // __dp2a
// Sums of counts by whole weights, which are exact: no count is made a float. They are shares of `whole`.
#define WIDEST 32768  // sums stay below 2^23
template <bool ODD> struct Across {
    unsigned first_two[RUN], third[RUN];
    float part;  // 1 / whole

    __device__ __forceinline__ Across(int x, int n, float part) : part(ODD ? part : 0.5f) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            first_two[i] = ODD ? (unsigned)(n / 2) << 16 | (unsigned)(n / 2 - x - i) & 0xffffu : 0x10001u;
            third[i] = (unsigned)(x + i + 1) & 0xffffu;
        }
    }
    __device__ __forceinline__ Values make(const unsigned* by, unsigned shift) const {
        const unsigned magic = 0x4b000000u;  // 2^23: with a sum in its last bits, as a float
        unsigned a = __funnelshift_r(by[0], by[1], shift), b = __funnelshift_r(by[1], by[2], shift), c = __funnelshift_r(by[2], 0u, shift);
        unsigned sums[RUN] = {__dp2a_lo(first_two[0], a, magic), __dp2a_hi(first_two[1], a, magic),
                              __dp2a_lo(first_two[2], b, magic), __dp2a_hi(first_two[3], b, magic)};
        if (ODD) {
            sums[0] = __dp2a_hi(third[0], a, sums[0]), sums[1] = __dp2a_lo(third[1], b, sums[1]);
            sums[2] = __dp2a_hi(third[2], b, sums[2]), sums[3] = __dp2a_lo(third[3], c, sums[3]);
        }
        Values made;
#pragma unroll
        for (int i = 0; i < RUN; ++i) made.at[i] = __uint_as_float(sums[i]) - 8388608.0f;
        return made;
    }
    __device__ __forceinline__ Value value(Value sum) const { return sum * part; }
};
#else
#define WIDEST (1 << 30)
template <bool ODD> struct Across {
    Shares by_width[RUN];

    __device__ __forceinline__ Across(int x, int n, float part) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) by_width[i] = shares(x + i, n, part);
    }
    __device__ __forceinline__ Values make(const unsigned* by, unsigned shift) const {
        unsigned words[] = {__funnelshift_r(by[0], by[1], shift), __funnelshift_r(by[1], by[2], shift), __funnelshift_r(by[2], 0u, shift)};
        Value texels[2 * RUN + 1];
#pragma unroll
        for (int i = 0; i < 2 * RUN + ODD; ++i) texels[i] = load((element)(words[i / RUN] >> 32 / RUN * (i % RUN)));
        Values made;
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            made.at[i] = ODD ? three(texels[2 * i], texels[2 * i + 1], texels[2 * i + ODD + 1], by_width[i])
                             : two(texels[2 * i], texels[2 * i + 1]);
        return made;
    }
    __device__ __forceinline__ Value value(Value made) const { return made; }
};
#endif

// The texels that a run is made of, row by row. A word is read where one of its texels is wanted, so none is where an
// image has none; of the others that are in it nothing is made.
template <bool ODD_COLUMNS> struct RunOfTexels {
    const element* at;
    int width;   // from row to row
    int wanted;  // bytes of a row

    template <bool ALL> __device__ __forceinline__ void read(unsigned* words, unsigned& shift) {
        int before = (int)((unsigned long long)at & 3ull);
        const unsigned* first = (const unsigned*)((const char*)at - before);
#pragma unroll
        for (int i = 0; i < RUN_WORDS; ++i)
            words[i] = ALL && (ODD_COLUMNS || i < 2) || 4 * i < before + wanted ? __ldg(first + i) : 0u;
        shift = 8u * (unsigned)(unsigned long long)at;  // of which shifts take what is below 32
        at += width;
    }
};

// Runs of level 1, one below the other, into shared memory: as values and, by the word, as they are stored.
template <bool ODD_ROWS, bool ODD_COLUMNS, bool ALL>
__device__ __forceinline__ void make_runs(RunOfTexels<ODD_COLUMNS> texels, const Across<ODD_COLUMNS>& across, int first,
                                          int last, int height, float part, Values* target, unsigned* stored) {
    unsigned words[RUN_WORDS], shift;
    Values above;
    if (ODD_ROWS) {
        texels.template read<ALL>(words, shift);
        above = across.make(words, shift);
    }
#pragma unroll 1
    for (int y = first; y < last; y += ROWS_AT_ONCE) {
        unsigned rows[2 * ROWS_AT_ONCE][RUN_WORDS], shifts[2 * ROWS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < 2 * ROWS_AT_ONCE; ++i)
            if (y + i / 2 < last) texels.template read<ALL>(rows[i], shifts[i]);
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i)
            if (y + i < last) {
                Values a = across.make(rows[2 * i], shifts[2 * i]), b = across.make(rows[2 * i + 1], shifts[2 * i + 1]);
                Shares by_height = shares(y + i, height, part);
                Values made;
                unsigned word = 0;
#pragma unroll
                for (int j = 0; j < RUN; ++j) {
                    Value value = ODD_ROWS ? three(above.at[j], a.at[j], b.at[j], by_height) : two(a.at[j], b.at[j]);
                    made.at[j] = across.value(value);
                    word |= (unsigned)store(made.at[j]) << 32 / RUN * j;
                }
                above = b;
                *target = made;
                *stored = word;
                target += TILE / RUN, stored += TILE / RUN;
            }
    }
}

// Level 1 of a tile, in runs: a thread has a piece of a column of them.
template <bool ODD_ROWS, bool ODD_COLUMNS>
__device__ __forceinline__ void make_run_of_words(const element* plane, const Side& down, const Side& right,
                                                    int window, Value* tile, unsigned* stored) {
    int columns = (1 << window - 1) / RUN, pieces = THREADS / columns, rows = down.end[1] - down.begin[1];
    int length = (rows + pieces - 1) / pieces, column = (int)threadIdx.x % columns;
    int x = right.begin[1] + column * RUN, y = (int)threadIdx.x / columns * length;
    int first = down.begin[1] + y, last = min(first + length, down.end[1]), width = right.n[0];
    if (x >= right.end[1] || first >= last) return;
    Across<ODD_COLUMNS> across(x, width, right.part[0]);
    RunOfTexels<ODD_COLUMNS> texels = {plane + ((long long)(2 * first) * width + 2 * x), width,
                                       (min(2 * RUN + ODD_COLUMNS, width - 2 * x)) * (int)sizeof(element)};
    Values* target = (Values*)(tile + y * TILE) + column;
    stored += y * (TILE / RUN) + column;
    if (2 * (x + RUN) + ODD_COLUMNS <= width)
        make_runs<ODD_ROWS, ODD_COLUMNS, true>(texels, across, first, last, down.n[0], down.part[0], target, stored);
    else
        make_runs<ODD_ROWS, ODD_COLUMNS, false>(texels, across, first, last, down.n[0], down.part[0], target, stored);
}

__device__ __forceinline__ bool in_words(const Chain& c) { return c.height > 1 && c.width > 1 && c.width < WIDEST; }

__device__ __forceinline__ void make_level_of_words(const element* plane, const Side& down, const Side& right,
                                                    int window, Value* tile, unsigned* stored) {
    if (down.n[0] % 2 && right.n[0] % 2)
        make_run_of_words<true, true>(plane, down, right, window, tile, stored);
    else if (down.n[0] % 2)
        make_run_of_words<true, false>(plane, down, right, window, tile, stored);
    else if (right.n[0] % 2)
        make_run_of_words<false, true>(plane, down, right, window, tile, stored);
    else
        make_run_of_words<false, false>(plane, down, right, window, tile, stored);
}

// What a tile owns of level 1, by the word, wherever rows of that begin.
__device__ __forceinline__ void write_words(const Side& down, const Side& right, int window, const unsigned* stored,
                                            const Level& level) {
    int columns = (1 << window - 1) / RUN, bytes = (right.own[1] - right.begin[1]) * (int)sizeof(element);
    for (int y = (int)threadIdx.x / columns; y < down.own[1] - down.begin[1]; y += THREADS / columns) {
        element* row = level.plane + ((long long)(down.begin[1] + y) * level.width + right.begin[1]);
        int before = (int)((unsigned long long)row & 3ull);  // bytes of the word that the row begins in
        const unsigned* made = stored + y * (TILE / RUN);
        for (int i = (int)threadIdx.x % columns; 4 * i < before + bytes; i += columns) {
            unsigned word = __funnelshift_l(i ? made[i - 1] : 0u, made[i], 8u * (unsigned)before);
            int at = 4 * i - before;  // of the row, in bytes
            if (at >= 0 && at + 4 <= bytes) {
                *(unsigned*)((char*)row + at) = word;
            } else {
#pragma unroll
                for (int j = 0; j < RUN; ++j) {
                    int texel = at / (int)sizeof(element) + j;
                    if (texel >= 0 && texel < bytes / (int)sizeof(element)) row[texel] = (element)(word >> 32 / RUN * j);
                }
            }
        }
    }
}
#endif
#endif

// The texels of a tile.
template <class Texels>
__device__ __forceinline__ From<Texels> of_tile(From<Texels> plane, const Side& down, const Side& right) {
    plane.first += (long long)down.begin[0] * plane.width + right.begin[0];
    return plane;
}

#ifndef EVEN
// Level base + 1 of a tile, of texels that were there before this launch.
__device__ __forceinline__ void make_first_level(const Chain& c, unsigned plane, int base, const Side& down,
                                                 const Side& right, int window, Value* odd, unsigned* stored,
                                                 Level level) {
    const element* image = c.source + plane * ((unsigned long long)c.height * c.width);
    level.wide = nullptr;  // as it is: only the last level of several is read again
#ifdef FLOAT32
    if (base == 0 && c.fours) return make_level_of_fours(image, c.width, down, right, odd, TILE, level);
#else
    if (base == 0 && in_words(c)) return make_level_of_words(image, down, right, window, odd, stored);
#endif
    From<OfImage> from = {image, c.width};
#ifdef KEEP_WIDE
    if (base == 0) return make_level<OfImage, 1>(of_tile(from, down, right), down, right, window, 1, odd, TILE, level);
    From<OfEarlier> earlier = made_of<OfEarlier>(c, plane, base);
#else
    From<OfImage> earlier = base ? made_of<OfImage>(c, plane, base) : from;
#endif
    make_level<OfEarlier, ROWS_AT_ONCE>(of_tile(earlier, down, right), down, right, window, 1, odd, TILE, level);
}
#endif

// Levels base + 1 to base + `levels` of a tile of level base.
__device__ void make_tile(const Chain& c, unsigned plane, int base, int levels, int window, int own, int tile_y,
                          int tile_x, Value* even, Value* odd, unsigned* stored, Side& down, Side& right) {
    int k = (int)threadIdx.x % 32;
    if (threadIdx.x < 32 && k <= levels) span(c, down, true, own, tile_y, base, levels, k);
    else if (threadIdx.x < 64 && k <= levels) span(c, right, false, own, tile_x, base, levels, k);
    __syncthreads();
    for (k = 1; k <= levels; ++k) {
        Level level = level_of(c, plane, base + k);
        if (k > 1) {
            From<OfTile> from = {k % 2 ? even : odd, k % 2 ? TILE / 2 : TILE};
            make_level<OfTile, 1>(from, down, right, window, k, k % 2 ? odd : even, k % 2 ? TILE : TILE / 2, level);
#ifndef EVEN  // else that is done already
        } else if (base == c.base) {
            make_first_level(c, plane, base, down, right, window, odd, stored, level);
#endif
        } else {
            From<OfLevel> from = of_tile(made_of<OfLevel>(c, plane, base), down, right);
            make_level<OfLevel, ROWS_AT_ONCE>(from, down, right, window, 1, odd, TILE, level);
        }
        __syncthreads();
#if !defined(EVEN) && !defined(FLOAT32)
        if (k == 1 && base == 0 && in_words(c)) write_words(down, right, window, stored, level);
#endif
    }
}

#ifdef EVEN
__device__ __forceinline__ Value quarter(Value a, Value b, Value c, Value d) { return two(two(a, b), two(c, d)); }

struct Square {
    Value at[4][4];
};

// What two levels of it are.
struct Halves {
    Value half[2][2], whole;
};

__device__ __forceinline__ Halves halves(const Square& s) {
    Halves h;
#pragma unroll
    for (int i = 0; i < 4; i += 2)
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            h.half[i / 2][j / 2] = quarter(s.at[i][j], s.at[i][j + 1], s.at[i + 1][j], s.at[i + 1][j + 1]);
    h.whole = quarter(h.half[0][0], h.half[0][1], h.half[1][0], h.half[1][1]);
    return h;
}

// Squares of 4 x 4 texels next to one another that a thread makes: as many as 16 bytes of a row are of.
#define PIECES (4 / (int)sizeof(element))

// What is read, and what is made of it, as it is stored. One instruction each where rows begin at multiples of that.
// What is read stays in words until it is needed: taken apart before, it would be waited for, and take four times the
// registers.
#define WORDS (int)sizeof(element)  // of four elements
struct alignas(4 * sizeof(element)) PieceOfRow { unsigned words[WORDS]; };
struct alignas(16) Row { PieceOfRow of[PIECES]; };
struct alignas(8) HalfRow { Two of[PIECES]; };
struct alignas(4) QuarterRow { element of[PIECES]; };

struct Stored {
    Row rows[4];

    __device__ __forceinline__ Value at(int row, int piece, int j) const {
        const unsigned* words = rows[row].of[piece].words;
#if defined(UINT8)
        return load((element)(words[0] >> 8 * j));
#elif defined(FLOAT32)
        return load(__uint_as_float(words[j]));
#else
        return load((element)(words[j / 2] >> 16 * (j % 2)));
#endif
    }
};
struct Quarters {
    HalfRow first[2];
    QuarterRow second;
    Value whole[PIECES];  // the second, unrounded
};

__device__ __forceinline__ Quarters quarters(const Stored& s) {
    Quarters q;
#if defined(UINT8) && defined(REDUCE_MEAN)
    // Sums of counts are exact, as their means in fp32 are. Two of them are added at once, in the halves of a word.
    const unsigned bytes = 0x00ff00ffu, ones = 0x00010001u;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        unsigned sums[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unsigned above = s.rows[2 * i].of[piece].words[0], below = s.rows[2 * i + 1].of[piece].words[0];
            sums[i] = (above & bytes) + (above >> 8 & bytes) + (below & bytes) + (below >> 8 & bytes);
            unsigned rounded = (sums[i] + ones + (sums[i] >> 2 & ones)) >> 2;  // to the nearest, ties to even
            q.first[i].of[piece].at[0] = (element)rounded;
            q.first[i].of[piece].at[1] = (element)(rounded >> 16);
        }
        unsigned sum = sums[0] + sums[1];
        sum = (sum & 0xffffu) + (sum >> 16);
        q.second.of[piece] = (element)((sum + 7u + (sum >> 4 & 1u)) >> 4);
        q.whole[piece] = (float)sum * 0.0625f;
    }
#else
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        Square square;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) square.at[i][j] = s.at(i, piece, j);
        Halves h = halves(square);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) q.first[i].of[piece].at[j] = store(h.half[i][j]);
        q.second.of[piece] = store(h.whole);
        q.whole[piece] = h.whole;
    }
#endif
    return q;
}

// A square of 4 x 4 values in shared memory. Of those beyond the image nothing is written.
__device__ __forceinline__ Value write_square(const Chain& c, unsigned plane, int level, int levels, int y, int x,
                                              const Value* values, int stride) {
    Square s;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s.at[i][j] = values[i * stride + j];
    Halves h = halves(s);
    Level first = level_of(c, plane, level + 1);
    int height = side_of_level(c.height, level + 1), width = first.width;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (2 * y + i < height && 2 * x + j < width)
                write(first, first.plane + ((long long)(2 * y + i) * width + 2 * x + j), h.half[i][j]);
    if (levels > 1 && 2 * y < height && 2 * x < width) {
        Level next = level_of(c, plane, level + 2);
        write(next, next.plane + ((long long)y * next.width + x), h.whole);
    }
    return h.whole;
}

struct Tile {
    unsigned plane;
    int y, x;
};

__device__ __forceinline__ Tile tile_at(const Chain& c, unsigned index) {
    unsigned of_plane = (unsigned)(c.tiles_x * c.tiles_y);
    Tile t;
    t.plane = index / of_plane;
    t.y = (int)(index - t.plane * of_plane) / c.tiles_x;
    t.x = (int)(index - t.plane * of_plane) - t.y * c.tiles_x;
    return t;
}

#define SQUARES (TILE / 4)  // of a side of a tile
#define BATCH 16            // tiles whose levels from 3 on are made together, so that all threads have one to make
// Threads to a row of squares. PIECES parts of a block make a tile each of so many that follow one another, mostly
// beside one another, so that whatever the type 256 bytes of a row are read at once: of 64 bytes memory gives little
// more than half as many.
#define COLUMNS (SQUARES / PIECES)
#define STEPS (BATCH / PIECES)  // tiles of a part to a batch

// A thread's squares of one tile after the other. From tile to tile what it reads and writes only moves on: to find it
// anew would take more than to make it. ROWS: those of the image begin at multiples of a Row, so that those of levels 1
// and 2 do of theirs.
template <bool ROWS> struct Walk {
    int tile_y, tile_x;
    const element* at;
    element *first, *second;  // of levels 1 and 2

    __device__ __forceinline__ int y() const { return tile_y * TILE + (int)threadIdx.x / SQUARES * 4; }
    __device__ __forceinline__ int x() const { return tile_x * TILE + (int)threadIdx.x % COLUMNS * (4 * PIECES); }
    __device__ __forceinline__ void find_source(const Chain& c, const Tile& t) {
        tile_y = t.y, tile_x = t.x;
        at = c.source + (t.plane * (unsigned long long)c.height + y()) * c.width + x();
    }
    __device__ __forceinline__ void find_levels(const Chain& c, const Tile& t) {
        unsigned long long row = t.plane * (unsigned long long)(c.height / 2) + y() / 2;
        first = c.packed + c.first[1] + row * (c.width / 2) + x() / 2;
        row = t.plane * (unsigned long long)(c.height / 4) + y() / 4;
        second = c.packed + c.first[2] + row * (c.width / 4) + x() / 4;
    }
    // How many of the squares are inside the image.
    __device__ __forceinline__ int inside(const Chain& c) const {
        return y() < c.height ? max(min((c.width - x()) / 4, PIECES), 0) : 0;
    }
    __device__ __forceinline__ void read(const Chain& c, int count, Stored& squares) const {
        if (ROWS) {
            if (count)
#pragma unroll
                for (int i = 0; i < 4; ++i) squares.rows[i] = *(const Row*)(at + (long long)i * c.width);
        } else {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                if (piece < count)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        squares.rows[i].of[piece] = *(const PieceOfRow*)(at + (long long)i * c.width + 4 * piece);
        }
    }
    __device__ __forceinline__ void write(const Chain& c, int count, const Quarters& q) const {
        if (ROWS) {
#pragma unroll
            for (int i = 0; i < 2; ++i) *(HalfRow*)(first + (long long)i * (c.width / 2)) = q.first[i];
            *(QuarterRow*)second = q.second;
        } else {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
                if (piece < count) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        *(Two*)(first + (long long)i * (c.width / 2) + 2 * piece) = q.first[i].of[piece];
                    second[piece] = q.second.of[piece];
                }
        }
    }
};

#ifdef KEEP_WIDE
// Level 2 of a batch of tiles, unrounded, where the next launch goes on from it.
__device__ void keep_wide(const Chain& c, unsigned begin, unsigned end, const Value* second) {
    for (unsigned slot = 0; slot < BATCH && begin + slot < end; ++slot) {
        Tile t = tile_at(c, begin + slot);
        int y = t.y * SQUARES + (int)threadIdx.x / SQUARES, x = t.x * SQUARES + (int)threadIdx.x % SQUARES;
        Level level = level_of(c, t.plane, 2);
        if (y < c.height / 4 && x < level.width)
            level.wide[(unsigned long long)y * level.width + x] = second[slot * (SQUARES * SQUARES) + threadIdx.x];
    }
}
#endif

// Levels 1 to `group`, two at least, of tiles from `begin` to before `end`. The two levels of the smallest squares a
// thread makes of what it has read; of those of a batch of tiles, each thread makes the next two; of these, one the
// last two.
template <bool ROWS>
__device__ __forceinline__ void make_even_tiles(const Chain& c, unsigned begin, unsigned end, Value* second,
                                                Value* fourth) {
    unsigned mine = begin + threadIdx.x / COLUMNS % PIECES;  // the tile that is read
    Tile tile = tile_at(c, mine);
    Walk<ROWS> walk;
    walk.find_source(c, tile);
    Stored squares;
    int inside = mine < end ? walk.inside(c) : 0;
    walk.read(c, inside, squares);
    walk.find_levels(c, tile);
#pragma unroll 1
    for (; begin < end; begin += BATCH) {
        Value* whole = second + threadIdx.x / COLUMNS % PIECES * (SQUARES * SQUARES) +
                       threadIdx.x / SQUARES * SQUARES + threadIdx.x % COLUMNS * PIECES;
#pragma unroll 1
        for (int step = 0; step < STEPS && mine < end; ++step) {
            int count = inside;
            Quarters made = quarters(squares);
            long long by[3] = {PIECES * TILE, PIECES * TILE / 2, PIECES * TILE / 4};
            for (walk.tile_x += PIECES; walk.tile_x >= c.tiles_x; walk.tile_x -= c.tiles_x) {
                bool ends = ++walk.tile_y == c.tiles_y;
                if (ends) walk.tile_y = 0;
#pragma unroll
                for (int i = 0; i < 3; ++i) by[i] += c.to_row[i] + (ends ? c.to_plane[i] : 0);
            }
            walk.at += by[0];
            mine += PIECES;
            inside = mine < end ? walk.inside(c) : 0;
            walk.read(c, inside, squares);
            if (count) {
                walk.write(c, count, made);
#pragma unroll
                for (int i = 0; i < PIECES; ++i) whole[i] = made.whole[i];
            }
            whole += PIECES * (SQUARES * SQUARES);
            walk.first += by[1], walk.second += by[2];
        }
        __syncthreads();
#ifdef KEEP_WIDE
        if (c.group == 2 && c.first_wide[2] != NOT_KEPT) keep_wide(c, begin, end, second);
#endif
        unsigned slot = threadIdx.x / 16, y = threadIdx.x / 4 % 4, x = threadIdx.x % 4;
        if (c.group > 2 && begin + slot < end) {
            Tile t = tile_at(c, begin + slot);
            fourth[threadIdx.x] = write_square(c, t.plane, 2, c.group - 2, t.y * 4 + (int)y, t.x * 4 + (int)x,
                                               second + slot * (SQUARES * SQUARES) + 4 * y * SQUARES + 4 * x, SQUARES);
        }
        __syncthreads();
        slot = threadIdx.x;
        if (c.group > 4 && slot < BATCH && begin + slot < end) {
            Tile t = tile_at(c, begin + slot);
            write_square(c, t.plane, 4, c.group - 4, t.y, t.x, fourth + 16 * slot, 4);
        }
    }
}
#endif

// Whether this block is the last one that makes tiles of a plane: all that were before it has then been written. The
// fences of one thread are the block's, as barriers stand before and behind them.
__device__ __forceinline__ bool last_of_plane(const Chain& c, unsigned plane, unsigned mine, int* last) {
    unsigned all = (unsigned)(c.tiles_x * c.tiles_y);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();  // what the block wrote is there before the count says so
        *last = atomicAdd(c.finished + plane, mine) == all - mine;
        if (*last) c.finished[plane] = 0;
        __threadfence();  // and what the others wrote, before any of it is read
    }
    __syncthreads();
    return *last;
}

// What is left of a plane, below level `base`, in one tile.
__device__ __forceinline__ int last_window(const Chain& c, int base) {
    return max(side_of_level(c.height, base), side_of_level(c.width, base)) > TILE ? GROUP + 1 : GROUP;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS(LEAST_BLOCKS)) reduce(const Chain c) {
    alignas(16) __shared__ Value odd[TILE * TILE];  // levels 1, 3, 5, 7 of a tile
    __shared__ Value even[TILE / 2 * TILE / 2];     // levels 2, 4, 6
    __shared__ Side down, right;
    __shared__ int last;
    unsigned* stored = nullptr;
#if !defined(EVEN) && !defined(FLOAT32)
    __shared__ unsigned words[TILE * TILE / RUN];  // level 1 as it is stored
    stored = words;
#endif
    unsigned of_plane = (unsigned)(c.tiles_x * c.tiles_y);
#ifdef EVEN
    unsigned begin = blockIdx.x * c.at_once, end = begin + c.at_once < c.tiles ? begin + c.at_once : c.tiles;
    bool rows = PIECES == 1 || c.width % (4 * PIECES) == 0 && (unsigned long long)c.source % sizeof(Row) == 0;
    if (rows) make_even_tiles<true>(c, begin, end, odd, even);
    else make_even_tiles<false>(c, begin, end, odd, even);
    if (!c.finish) return;
    for (unsigned plane = begin / of_plane; plane * of_plane < end; ++plane) {
        unsigned first = plane * of_plane, beyond = first + of_plane;
        unsigned mine = (end < beyond ? end : beyond) - (begin > first ? begin : first);
        if (last_of_plane(c, plane, mine, &last))
            make_tile(c, plane, c.group, c.levels - 1 - c.group, last_window(c, c.group), 2 * TILE, 0, 0, even, odd,
                      stored, down, right);
    }
#else
    unsigned plane = blockIdx.x / of_plane;
    int tile_y = (int)(blockIdx.x - plane * of_plane) / c.tiles_x;
    int tile_x = (int)(blockIdx.x - plane * of_plane) - tile_y * c.tiles_x;
    int base = c.base, levels = c.group, window = c.window, own = c.own;
    for (;;) {
        make_tile(c, plane, base, levels, window, own, tile_y, tile_x, even, odd, stored, down, right);
        if (!c.finish || base > c.base || !last_of_plane(c, plane, 1, &last)) return;
        base += levels, levels = c.levels - 1 - base, tile_y = tile_x = 0;
        window = last_window(c, base), own = 2 * TILE;
    }
#endif
}
