#version 430
// A foveated picture for renderers whose texture units are software: an invocation makes a block of 4 x 4 pixels, fetches
// each texel under it once for all of them, and filters by itself. Less than half the time of foveate.comp on a CPU.
//
// PER_WORD, AT_ONCE (at_once.glsl): rows are whole vectors. CHANNELS, TO_STORED (foveate.glsl). BUFFERED (texels.glsl)
// SERIES   blocks are small against their distance from the fixation: one logarithm does for all of a block
// TEXELS   texels of a level, along a side, that a block may touch: 4 at any level, 3 from level 2 on, and 2 from level 3 on
//          where the sides of all levels are halves. With 2 a block lies between the same texels, and each level is a
//          bilinear function of the place in it.
#include "words.glsl"
#include "at_once.glsl"
#include "foveate.glsl"
#include "texels.glsl"

layout(local_size_x = 32, local_size_y = 1) in;
layout(std430, binding = 2) readonly buffer Tiles { uint b_tiles[]; };  // of 128 x 4 pixels: layer << 23 | row << 9 | column
uniform ivec4 u_first_stored;  // index in each binding of that channel of the texture's first image
uniform int u_first_tile;    // of the texture's tiles in b_tiles
uniform int u_tiles;
uniform int u_first_layer;   // that the tiles' layers count from
uniform ivec2 u_size;

#if CHANNELS == 1
#define TEXEL float
#define SWIZZLE r
#elif CHANNELS == 2
#define TEXEL vec2
#define SWIZZLE rg
#elif CHANNELS == 3
#define TEXEL vec3
#define SWIZZLE rgb
#else
#define TEXEL vec4
#define SWIZZLE rgba
#endif

// A binding a channel: an image may be more than one may hold.
layout(std430, binding = 0) writeonly buffer Target0 { STORED b_target0[]; };
#if CHANNELS > 1
layout(std430, binding = 3) writeonly buffer Target1 { STORED b_target1[]; };
#endif
#if CHANNELS > 2
layout(std430, binding = 4) writeonly buffer Target2 { STORED b_target2[]; };
#endif
#if CHANNELS > 3
layout(std430, binding = 5) writeonly buffer Target3 { STORED b_target3[]; };
#endif

const float INVERSE_LN2 = 1.44269504;

#if TEXELS == 2
#if CHANNELS == 1
#define OF(v_) v_
#else
#define OF(v_) v_[c]
#endif

// A level in a block: at + x right + y (down + x twist), x and y in pixels from the block's first.
struct Surface { TEXEL at, right, down, twist; };

Surface surface(int layer, int l, vec2 place) {
    Level source = level_at(layer, l);
    vec2 first = place * vec2(source.size) - 0.5, whole = floor(first), per_pixel = vec2(source.size) * u_pixel;
    first -= whole;
    ivec2 low = clamp(ivec2(whole), ivec2(0), source.size - 1), high = clamp(ivec2(whole) + 1, ivec2(0), source.size - 1);
    TEXEL a = TEXEL_AT(source, low).SWIZZLE, b = TEXEL_AT(source, ivec2(high.x, low.y)).SWIZZLE - a;
    TEXEL c = TEXEL_AT(source, ivec2(low.x, high.y)).SWIZZLE, d = TEXEL_AT(source, high).SWIZZLE - c;
    a += b * first.x;
    c += d * first.x - a;
    b *= per_pixel.x;
    d = d * per_pixel.x - b;
    return Surface(a + c * first.y, b + d * first.y, c * per_pixel.y, d * per_pixel.y);
}
#endif

float tent(float distance_) { return max(0.0, 1.0 - abs(distance_)); }

// Four neighbours of a row.
void store_row(ivec2 at, ivec4 first, TEXEL a, TEXEL b, TEXEL c, TEXEL d) {
    if (at.y >= u_size.y) return;
    vec4 texel[4];
    texel[0].SWIZZLE = a * TO_STORED;
    texel[1].SWIZZLE = b * TO_STORED;
    texel[2].SWIZZLE = c * TO_STORED;
    texel[3].SWIZZLE = d * TO_STORED;
    for (int k = 0; k < 4; k += AT_ONCE) {
        if (at.x + k < u_size.x) {
            ivec4 vector = first + k / AT_ONCE;
            b_target0[vector.r] = PACKED(texel, k, r);
#if CHANNELS > 1
            b_target1[vector.g] = PACKED(texel, k, g);
#endif
#if CHANNELS > 2
            b_target2[vector.b] = PACKED(texel, k, b);
#endif
#if CHANNELS > 3
            b_target3[vector.a] = PACKED(texel, k, a);
#endif
        }
    }
}

#define STORE_ROW(y) \
    store_row(at + ivec2(0, y), target + y * row_vectors, sum[4 * y], sum[4 * y + 1], sum[4 * y + 2], sum[4 * y + 3]);

void main() {
    int turn = int(gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x);
    if (turn >= u_tiles) return;
    uint tile = b_tiles[u_first_tile + turn];
    int layer = u_first_layer + int(tile >> 23), image = u_first_image + layer;
    ivec2 at = ivec2(tile << 7, tile >> 7) & ivec2(0xff80, 0xfffc);
    at += 4 * ivec2(gl_LocalInvocationID.xy);
    if (at.x >= u_size.x || at.y >= u_size.y) return;

    vec2 place = (vec2(at) + 0.5) * u_pixel;
    vec2 away = away_from(b_fixations[image], place), step_ = u_pixel * u_box;
#ifdef SERIES
    float e = length(away + 1.5 * step_), middle = log2(1.0 + e) + u_bias;
#endif
    float level[16];
    TEXEL sum[16];
    float least = 100.0, most = 0.0;
    for (int i = 0; i < 16; ++i) {
        vec2 here = away + vec2(i & 3, i >> 2) * step_;
#ifdef SERIES
        float t = (sqrt(dot(here, here)) - e) / (1.0 + e);
        level[i] = max(middle + t * (INVERSE_LN2 + t * (-INVERSE_LN2 / 2.0 + t * (INVERSE_LN2 / 3.0))), 0.0);
#else
        level[i] = level_at(here);
#endif
        least = min(least, level[i]);
        most = max(most, level[i]);
        sum[i] = TEXEL(0.0);
    }
    int last = last_level();
    least = min(least, float(last));
    // Asked for at the end of loops, as a software renderer walks through the rest of one that every lane has left.
#if TEXELS == 2
    // Two neighbouring levels in their turn, for the pixels that read them or higher ones; seldom once more.
    int l = int(least);
    most = min(most, float(last));
    do {
        Surface fine = surface(layer, l, place), coarse = surface(layer, min(l + 1, last), place);
        float share[16];
        for (int i = 0; i < 16; ++i) share[i] = min(level[i] - float(l), 1.0);
        for (int c = 0; c < CHANNELS; ++c) {  // a channel and a row at a time: few values are alive at once
            float at_ = OF(fine.at), right = OF(fine.right), down = OF(fine.down), twist = OF(fine.twist);
            float gain = OF(coarse.at) - at_, gain_right = OF(coarse.right) - right;
            float gain_down = OF(coarse.down) - down, gain_twist = OF(coarse.twist) - twist;
            for (int y = 0; y < 4; ++y) {
                float value = at_ + float(y) * down, step_ = right + float(y) * twist;
                float more = gain + float(y) * gain_down, step_more = gain_right + float(y) * gain_twist;
                for (int x = 0; x < 4; ++x) {
                    int i = 4 * y + x;
                    OF(sum[i]) = share[i] < 0.0 ? OF(sum[i]) : value + share[i] * more;
                    value += step_;
                    more += step_more;
                }
            }
        }
    } while (float(++l) < most);
#else
    // Each level in its turn, for all pixels of the block: two levels, seldom three.
    int l = int(least), end = int(min(most + 1.0, float(last)));
    do {
        Level source = level_at(layer, l);
        vec2 first = l == 0 ? vec2(at) : place * vec2(source.size) - 0.5;  // exact where texels are pixels
        vec2 whole = floor(first), per_pixel = vec2(source.size) * u_pixel;
        first -= whole;
        TEXEL across[4 * TEXELS];  // rows of texels, filtered along x
        for (int j = 0; j < TEXELS; ++j) {
            TEXEL texels[TEXELS];
            for (int i = 0; i < TEXELS; ++i) {
                ivec2 from = clamp(ivec2(whole) + ivec2(i, j), ivec2(0), source.size - 1);
                texels[i] = TEXEL_AT(source, from).SWIZZLE;
            }
            for (int x = 0; x < 4; ++x) {
                float u = first.x + float(x) * per_pixel.x;
                across[4 * j + x] = texels[0] * tent(u);
                for (int i = 1; i < TEXELS; ++i) across[4 * j + x] += texels[i] * tent(u - float(i));
            }
        }
        for (int y = 0; y < 4; ++y) {
            float v = first.y + float(y) * per_pixel.y;
            for (int x = 0; x < 4; ++x) {
                TEXEL value = across[x] * tent(v);
                for (int j = 1; j < TEXELS; ++j) value += across[4 * j + x] * tent(v - float(j));
                sum[4 * y + x] += tent(min(level[4 * y + x], float(last)) - float(l)) * value;
            }
        }
    } while (++l <= end);
#endif
    int row_vectors = int(uint(u_size.x) / uint(AT_ONCE));
    ivec4 target = u_first_stored + (layer * CHANNELS * u_size.y + at.y) * row_vectors + int(uint(at.x) / uint(AT_ONCE));
    // Not in a loop, which would keep the sums in memory where it is not unrolled.
    STORE_ROW(0)
    STORE_ROW(1)
    STORE_ROW(2)
    STORE_ROW(3)
}
