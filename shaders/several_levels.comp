#version 430
// Several levels of a mip chain at once, buffer to buffer: each invocation takes a block of the source down to one word of
// the last of them, in registers, without shared memory or barriers. Every side it reduces is even, rows of the last level
// are whole words, and all levels start at multiples of 16 bytes: a row of a block is a vector or two, which software
// renderers load and store in about a third of the time of single words.
// The dispatch is (words of a row of the last level, its rows, planes).
//
// PER_WORD, REDUCE_* as in footprint.glsl
// LEVELS       2 or 3, each in a binding of its own
// FETCHED      the source is a buffer texture, which software renderers read faster
// SOURCE_WIDE  the source is fp32 whatever PER_WORD says
// KEEP_WIDE    also write the last level as fp32, so that the next one starts from unrounded values
#include "words.glsl"
#include "footprint.glsl"

layout(local_size_x = LOCAL_SIZE) in;
#ifdef FETCHED
layout(binding = 0) uniform usamplerBuffer b_source;
#define SOURCE(i_) texelFetch(b_source, i_)
#else
layout(std430, binding = 0) readonly buffer Source { uvec4 b_source[]; };
#define SOURCE(i_) b_source[i_]
#endif
#if LEVELS == 3
layout(std430, binding = 1) writeonly buffer First { uvec4 b_first[]; };
layout(std430, binding = 2) writeonly buffer Second { uvec2 b_second[]; };
layout(std430, binding = 3) writeonly buffer Third { uint b_third[]; };
#define LAST third
#else
layout(std430, binding = 1) writeonly buffer First { uvec2 b_first[]; };
layout(std430, binding = 2) writeonly buffer Second { uint b_second[]; };
#define LAST second
#endif
#ifdef KEEP_WIDE
#define VECTOR_TYPE(n_) vec##n_
#define VECTOR(n_) VECTOR_TYPE(n_)
layout(std430, binding = 4) writeonly buffer Wide { VECTOR(PER_WORD) b_wide[]; };
uniform int u_first_wide;
#endif

uniform ivec2 u_size;     // of the last level
uniform int u_first_row;  // of it, in this dispatch
uniform ivec4 u_firsts;   // texel 0 of the dispatch's first plane: in the source, and in the levels

#define ROWS (1 << (LEVELS - 1))   // that an invocation makes of the first level
#define TEXELS (ROWS * PER_WORD)   // in each of them

VALUE half_of(VALUE a, VALUE b) {
#ifdef REDUCE_MEAN
    return 0.5 * a + 0.5 * b;
#else
    return REDUCE(a, b);
#endif
}

VALUE value_of(uint bits) {
#ifndef REDUCE_MEAN
    return to_key(bits);
#elif defined(SOURCE_WIDE)
    return uintBitsToFloat(bits);
#else
    return to_float(bits);
#endif
}

#if PER_WORD == 1 || defined(SOURCE_WIDE)
#define SOURCE_PER_WORD 1
#else
#define SOURCE_PER_WORD PER_WORD
#endif

// Neighbours of a row of the source, from element `first` on, reduced.
void load(int first, out VALUE row[TEXELS]) {
    for (int k = 0; k < TEXELS; k += 2 * SOURCE_PER_WORD) {
        uvec4 words = SOURCE((first + 2 * k) / (4 * SOURCE_PER_WORD));
#if SOURCE_PER_WORD == 1
        row[k] = half_of(value_of(words.x), value_of(words.y));
        row[k + 1] = half_of(value_of(words.z), value_of(words.w));
#elif SOURCE_PER_WORD == 2
        for (int i = 0; i < 4; ++i) row[k + i] = half_of(value_of(words[i] & 0xffffu), value_of(words[i] >> 16));
#else
        for (int i = 0; i < 4; ++i) {
            row[k + 2 * i] = half_of(value_of(words[i] & 0xffu), value_of(words[i] >> 8 & 0xffu));
            row[k + 2 * i + 1] = half_of(value_of(words[i] >> 16 & 0xffu), value_of(words[i] >> 24));
        }
#endif
    }
}

// `count` words of texels, from element `first` on.
#define STORE(buffer_, first_, texels_, count_)                                          \
    {                                                                                    \
        uint words[4] = uint[4](0u, 0u, 0u, 0u);                                         \
        for (int w = 0; w < count_; ++w) {                                               \
            VALUE word[PER_WORD];                                                        \
            for (int k = 0; k < PER_WORD; ++k) word[k] = texels_[w * PER_WORD + k];      \
            words[w] = stored_word(word);                                                \
        }                                                                                \
        buffer_[(first_) / (PER_WORD * count_)] = WORDS_##count_;                        \
    }
#define WORDS_1 words[0]
#define WORDS_2 uvec2(words[0], words[1])
#define WORDS_4 uvec4(words[0], words[1], words[2], words[3])
#define FIRST_OF(first_, plane_, row_, level_)                                          \
    ((first_) + (((plane_) * (u_size.y << (level_)) + (row_)) * u_size.x + int(gl_GlobalInvocationID.x) * PER_WORD << (level_)))

void main() {
    if (int(gl_GlobalInvocationID.x) * PER_WORD >= u_size.x) return;
    int plane = int(gl_GlobalInvocationID.z), y = u_first_row + int(gl_GlobalInvocationID.y);
    VALUE upper[TEXELS], lower[TEXELS];
    VALUE before_second[TEXELS / 2];
#if LEVELS == 3
    VALUE before_third[TEXELS / 4];
#endif
    for (int r = 0; r < ROWS; ++r) {
        int row = y * ROWS + r;
        load(FIRST_OF(u_firsts.x, plane, 2 * row, LEVELS), upper);
        load(FIRST_OF(u_firsts.x, plane, 2 * row + 1, LEVELS), lower);
        VALUE first[TEXELS];
        for (int k = 0; k < TEXELS; ++k) first[k] = half_of(upper[k], lower[k]);
#if LEVELS == 3
        STORE(b_first, FIRST_OF(u_firsts.y, plane, row, 2), first, 4)
#else
        STORE(b_first, FIRST_OF(u_firsts.y, plane, row, 1), first, 2)
#endif
        VALUE second[TEXELS / 2];
        for (int k = 0; k < TEXELS / 2; ++k) second[k] = half_of(first[2 * k], first[2 * k + 1]);
        if (r % 2 == 0) {
            before_second = second;
            continue;
        }
        for (int k = 0; k < TEXELS / 2; ++k) second[k] = half_of(before_second[k], second[k]);
#if LEVELS == 2
        STORE(b_second, FIRST_OF(u_firsts.z, plane, y, 0), second, 1)
#else
        STORE(b_second, FIRST_OF(u_firsts.z, plane, row / 2, 1), second, 2)
        VALUE third[TEXELS / 4];
        for (int k = 0; k < TEXELS / 4; ++k) third[k] = half_of(second[2 * k], second[2 * k + 1]);
        if (r == 1) {
            before_third = third;
            continue;
        }
        for (int k = 0; k < TEXELS / 4; ++k) third[k] = half_of(before_third[k], third[k]);
        STORE(b_third, FIRST_OF(u_firsts.w, plane, y, 0), third, 1)
#endif
#ifdef KEEP_WIDE
        b_wide[FIRST_OF(u_first_wide, plane, y, 0) / PER_WORD] = VALUES_OF(LAST);
#endif
    }
}
