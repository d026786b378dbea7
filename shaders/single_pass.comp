#version 430
// A whole chain in one dispatch, for a batch of planes, after AMD's FidelityFX Single Pass Downsampler.
//
// A workgroup takes a tile of 2^STEPS x 2^STEPS texels of the source down to one, through shared memory, and writes all
// levels on the way. That one texel goes to a tail as well. The workgroup that is the last of its plane to come so far
// goes on with the tail as it did with the source, tile by tile, and so forth down to the last level. Where a side is odd, a
// footprint reaches into the next tile: a tile also makes a margin of texels that it does not own and does not store.
//
// PER_WORD, REDUCE_* as in footprint.glsl; the defines of source.glsl
// STEPS        levels that a tile makes; FIRST_SIDE  texels along a side of the first of them, with the margin
// THREADS_X, THREADS_Y  shape of the workgroup
// KEEP_TOP     the source, converted, is written as level 0
// SUBGROUPS    invocations make steps 2 to 4 from one another's registers where sides are even
#ifdef SUBGROUPS
#include "lanes.glsl"
#endif
#include "words.glsl"
#include "footprint.glsl"
#include "source.glsl"

layout(local_size_x = THREADS_X, local_size_y = THREADS_Y) in;
// Levels 1 and 2 are bound in parts where they must, what comes after them as a whole. Atomics: a word at the end of a
// row may hold texels of another workgroup.
layout(std430, binding = 1) buffer First { uint b_first[]; };
layout(std430, binding = 2) buffer Second { uint b_second[]; };
layout(std430, binding = 3) buffer Rest { uint b_rest[]; };
layout(std430, binding = 4) coherent buffer Tail { uint b_tail[]; };
layout(std430, binding = 5) coherent buffer Counters { uint b_done[]; };  // tiles of each plane that are done; 0 between calls
layout(std430, binding = 6) readonly buffer Levels { int b_levels[]; };
#ifdef KEEP_TOP
layout(std430, binding = 7) buffer Top { uint b_top[]; };
uniform int u_top_first;
#endif

uniform int u_last;          // level
uniform int u_first_row;     // of tiles, in this dispatch
uniform int u_tiles;         // of a plane, in all dispatches that count it
uniform ivec2 u_firsts;      // texel 0 of plane 0 in b_first and b_second; negative if bound from a later one

int area(ivec2 size) { return size.x * size.y; }

// The table of levels: width, height, margin along both, first element in b_rest (from level 3 on) and in b_tail.
ivec2 size_of(int level) { return ivec2(b_levels[6 * level], b_levels[6 * level + 1]); }
ivec2 margin_of(int level) { return ivec2(b_levels[6 * level + 2], b_levels[6 * level + 3]); }
int rest_of(int level) { return b_levels[6 * level + 4] + plane() * area(size_of(level)); }
int tail_of(int level) { return b_levels[6 * level + 5] + local_plane() * area(size_of(level)); }

#define SECOND_SIDE ((FIRST_SIDE + 1) / 2)
shared bool s_last;
#ifdef SUBGROUPS
// Steps 1 to 4 lie behind one another, since three of them are made at once; 5 and 6 where 1 and 2 were.
#define THIRD_SIDE ((SECOND_SIDE + 1) / 2)
#define FOURTH_SIDE ((THIRD_SIDE + 1) / 2)
#define BEFORE_THIRD (FIRST_SIDE * FIRST_SIDE + SECOND_SIDE * SECOND_SIDE)
shared VALUE s_value[BEFORE_THIRD + THIRD_SIDE * THIRD_SIDE + FOURTH_SIDE * FOURTH_SIDE];
int slot(int step, ivec2 at) {
    if (step == 3) return BEFORE_THIRD + at.y * THIRD_SIDE + at.x;
    if (step == 4) return BEFORE_THIRD + THIRD_SIDE * THIRD_SIDE + at.y * FOURTH_SIDE + at.x;
    return (step & 1) == 1 ? at.y * FIRST_SIDE + at.x : FIRST_SIDE * FIRST_SIDE + at.y * SECOND_SIDE + at.x;
}
#else
// Odd steps of a tile lie at the start, even ones behind them: a step reads the one before it.
shared VALUE s_value[FIRST_SIDE * FIRST_SIDE + SECOND_SIDE * SECOND_SIDE];
int slot(int step, ivec2 at) {
    return (step & 1) == 1 ? at.y * FIRST_SIDE + at.x : FIRST_SIDE * FIRST_SIDE + at.y * SECOND_SIDE + at.x;
}
#endif

// Of the texels that a tile makes at a step.
struct Made {
    int step;
    ivec2 size;    // of the whole level
    ivec2 origin;  // in it
    ivec2 owned;   // texels along both sides from there on; none if the tile lies beyond the level
    ivec2 with_margin;
};

Made made(int base, int steps, int step, ivec2 tile) {
    Made m;
    m.step = step;
    m.size = size_of(base + step);
    m.origin = tile << (steps - step);
    int side = 1 << (steps - step);
    m.owned = min(m.origin + side, m.size) - m.origin;
    m.with_margin = min(m.origin + side + margin_of(base + step), m.size) - m.origin;
    return m;
}

#define EACH_TEXEL(at_, count_)                                                     \
    for (int y_ = int(gl_LocalInvocationID.y); y_ < (count_).y; y_ += THREADS_Y)    \
        for (ivec2 at_ = ivec2(gl_LocalInvocationID.x, y_); at_.x < (count_).x; at_.x += THREADS_X)

void from_shared(Made m, ivec2 above) {
    ivec2 taps = taps_of(above);
    if (taps == ivec2(2)) {
        EACH_TEXEL(at, m.with_margin) {
            int corner = slot(m.step - 1, 2 * at);
            int below = slot(m.step - 1, 2 * at + ivec2(0, 1));
            s_value[slot(m.step, at)] =
                quad(s_value[corner], s_value[corner + 1], s_value[below], s_value[below + 1]);
        }
    } else {
        EACH_TEXEL(at, m.with_margin) {
            VALUE v[9];
            for (int k = 0; k < 9; ++k) {
                ivec2 tap = ivec2(k % 3, k / 3);
                VALUE texel = s_value[slot(m.step - 1, 2 * at + min(tap, taps - 1))];
                v[k] = tap.x < taps.x && tap.y < taps.y ? texel : NOTHING;
            }
            s_value[slot(m.step, at)] = box(v, m.origin + at, m.size, taps);
        }
    }
}

#ifdef SUBGROUPS
// Whether steps 2 to 4 of a tile are of 2 x 2 texels each, none beyond the tile; and many enough to fill subgroups: one of
// which only some lanes are at work would meet there, while the others wait at the workgroup's barrier.
bool fit_lanes(int base, int steps) {
    return steps >= 5 && margin_of(base + 1) == ivec2(0) && all(greaterThan(size_of(base + 3), ivec2(1))) &&
        LANES_MEET(16, THREADS_X * THREADS_Y);
}

// Every other bit of a number from bit 0 on.
int even_bits(int bits) {
    bits &= 0x55;
    bits = (bits | (bits >> 1)) & 0x33;
    return (bits | (bits >> 2)) & 0x0f;
}

// Steps 2 to 4, from step 1 in shared memory. Lanes go through the texels of step 2 in Morton order: those of a quad are
// neighbours, and so are four quads of a quad. What lies beyond the level stays beyond it.
void in_lanes(int steps) {
    int side = 1 << (steps - 2);
    for (int lane = LANE; lane < side * side; lane += THREADS_X * THREADS_Y) {
        LANES_TOGETHER;
        ivec2 at = ivec2(even_bits(lane), even_bits(lane >> 1));
        int corner = slot(1, 2 * at), below = slot(1, 2 * at + ivec2(0, 1));
        VALUE second = quad(s_value[corner], s_value[corner + 1], s_value[below], s_value[below + 1]);
        VALUE third = quad(second, OTHER_LANE(second, 1u), OTHER_LANE(second, 2u), OTHER_LANE(second, 3u));
        VALUE fourth = quad(third, OTHER_LANE(third, 4u), OTHER_LANE(third, 8u), OTHER_LANE(third, 12u));
        s_value[slot(2, at)] = second;
        if ((lane & 3) == 0) s_value[slot(3, at / 2)] = third;
        if ((lane & 15) == 0) s_value[slot(4, at / 4)] = fourth;
    }
}
#endif

void from_tail(Made m, int above) {
    ivec2 size = size_of(above), taps = taps_of(size);
    int first = tail_of(above);
    EACH_TEXEL(at, m.with_margin) {
        VALUE v[9];
        for (int k = 0; k < 9; ++k) {
            ivec2 tap = ivec2(k % 3, k / 3), place = 2 * (m.origin + at) + tap;
            v[k] = NOTHING;
            if (tap.x < taps.x && tap.y < taps.y) v[k] = FROM_CARRIED(b_tail[first + place.y * size.x + place.x]);
        }
        s_value[slot(m.step, at)] = box(v, m.origin + at, m.size, taps);
    }
}

// The words that hold the texels a tile owns, row by row; `first` is the level's texel 0 of this plane in the buffer.
// Words at the ends of a row may hold others' texels too, which are left as they are.
#define STORE(buffer_, first_, origin_, owned_, width_, value_)                                             \
    for (int y_ = int(gl_LocalInvocationID.y); y_ < (owned_).y; y_ += THREADS_Y) {                          \
        int begin_ = (first_) + ((origin_).y + y_) * (width_) + (origin_).x;                                \
        int end_ = begin_ + (owned_).x;                                                                     \
        for (int word_ = begin_ / PER_WORD + int(gl_LocalInvocationID.x); word_ * PER_WORD < end_; word_ += THREADS_X) { \
            VALUE texels_[PER_WORD];                                                                        \
            uint mask_ = 0u;                                                                                \
            for (int k = 0; k < PER_WORD; ++k) {                                                            \
                int element_ = word_ * PER_WORD + k;                                                        \
                texels_[k] = NOTHING;                                                                       \
                if (element_ >= begin_ && element_ < end_) {                                                \
                    ivec2 at_ = ivec2(element_ - begin_, y_);                                               \
                    texels_[k] = value_(at_);                                                               \
                    mask_ |= (0xffffffffu >> (32 - 32 / PER_WORD)) << (k * (32 / PER_WORD));                \
                }                                                                                           \
            }                                                                                               \
            uint bits_ = stored_word(texels_);                                                              \
            if (mask_ == 0xffffffffu) {                                                                     \
                buffer_[word_] = bits_;                                                                     \
            } else {                                                                                        \
                atomicAnd(buffer_[word_], ~mask_);                                                          \
                atomicOr(buffer_[word_], bits_ & mask_);                                                    \
            }                                                                                               \
        }                                                                                                   \
    }

void keep_tail(Made m, int level, ivec2 tile) {
    if (gl_LocalInvocationIndex == 0u && all(greaterThan(m.owned, ivec2(0)))) {
        b_tail[tail_of(level) + tile.y * m.size.x + tile.x] = CARRIED_BITS(s_value[slot(m.step, ivec2(0))]);
        memoryBarrierBuffer();
    }
}

// A step of a tile, from the one before it; returns the last that is made with it.
int make(Made m, ivec2 above, int base, int steps) {
#ifdef SUBGROUPS
    if (m.step == 2 && fit_lanes(base, steps)) {
        in_lanes(steps);
        return 4;
    }
#endif
    from_shared(m, above);
    return m.step;
}

// Stores steps `from` to `steps` of a tile, of which those up to `ready` are in shared memory.
void rest_of_tile(int base, int steps, int from, int ready, ivec2 tile) {
    Made m = made(base, steps, from - 1, tile);
    for (int step = from; step <= steps; ++step) {
        ivec2 above = m.size;
        m = made(base, steps, step, tile);
        if (step > ready) {
            ready = make(m, above, base, steps);
            barrier();
        }
#define HERE(at_) s_value[slot(m.step, at_)]
        STORE(b_rest, rest_of(base + step), m.origin, m.owned, m.size.x, HERE)
    }
    if (base + steps < u_last) keep_tail(m, base + steps, tile);
}

void main() {
    ivec2 tile = ivec2(gl_WorkGroupID.xy) + ivec2(0, u_first_row);
    int steps = min(STEPS, u_last);
    Made m = made(0, steps, 1, tile);
#ifdef KEEP_TOP
    {
        ivec2 origin = tile << steps, owned = min(origin + (1 << steps), u_source_size) - origin;
#define IN_SOURCE(at_) source_texel(origin + (at_))
        STORE(b_top, u_top_first + plane() * area(u_source_size), origin, owned, u_source_size.x, IN_SOURCE)
    }
#endif
    EACH_TEXEL(at, m.with_margin) s_value[slot(1, at)] = of_source(m.origin + at, m.size);
    barrier();
    STORE(b_first, u_firsts.x + plane() * area(m.size), m.origin, m.owned, m.size.x, HERE)
    int ready = 1;
    if (steps > 1) {
        ivec2 above = m.size;
        m = made(0, steps, 2, tile);
        ready = make(m, above, 0, steps);
        barrier();
        STORE(b_second, u_firsts.y + plane() * area(m.size), m.origin, m.owned, m.size.x, HERE)
    }
    if (steps > 2) rest_of_tile(0, steps, 3, ready, tile);
    if (u_last <= STEPS) return;

    if (gl_LocalInvocationIndex == 0u) {  // the one that wrote to the tail
        s_last = atomicAdd(b_done[local_plane()], 1u) == uint(u_tiles - 1);
        if (s_last) b_done[local_plane()] = 0u;
    }
    barrier();
    if (!s_last) return;
    memoryBarrierBuffer();
    for (int base = STEPS; base < u_last; base += STEPS) {
        steps = min(STEPS, u_last - base);
        ivec2 tiles = (size_of(base + 1) + (1 << (steps - 1)) - 1) >> (steps - 1);
        for (tile.y = 0; tile.y < tiles.y; ++tile.y) {
            for (tile.x = 0; tile.x < tiles.x; ++tile.x) {
                m = made(base, steps, 1, tile);
                from_tail(m, base);
                barrier();
                STORE(b_rest, rest_of(base + 1), m.origin, m.owned, m.size.x, HERE)
                rest_of_tile(base, steps, 2, 1, tile);
                barrier();
            }
        }
    }
}
