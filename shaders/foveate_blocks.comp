#version 430
// A foveated picture for renderers whose texture units are software: an invocation makes a block of 4 x 4 pixels, fetches
// each texel under it once for all of them, and filters by itself. Less than half the time of foveate.comp on a CPU.
//
// PER_WORD, AT_ONCE and others: foveate_tiles.glsl
// SERIES   blocks are small against their distance from the fixation: one logarithm does for all of a block
// TEXELS   texels of a level, along a side, that a block may touch: 4 at any level, 3 from level 2 on, and 2 from level 3 on
//          where the sides of all levels are halves: a block lies between the same texels, and each level is a bilinear
//          function of the place in it
// HALVES   so they are, and no block has pixels more than a level apart. Texels' centres lie between blocks from level 3
//          on, and of level 2 in their middles
#define LANES 32
#define TILES 4
#include "foveate_tiles.glsl"

#ifdef HALVES
// A level in a block: at + x right + y (down + x twist), x and y in pixels from the block's first.
struct Surface { TEXEL at, right, down, twist; };

Surface surface(int layer, int l, ivec2 at) {
    Place p = place_of(layer, l, at);
    TEXEL a = texel_of(p, 0, 0), b = texel_of(p, 1, 0) - a;
    TEXEL c = texel_of(p, 0, 1), d = texel_of(p, 1, 1) - c;
    a += b * p.first.x;
    c += d * p.first.x - a;
    b *= p.per_pixel;
    d = d * p.per_pixel - b;
    return Surface(a + c * p.first.y, b + d * p.first.y, c * p.per_pixel, d * p.per_pixel);
}
#endif

float tent(float distance_) { return max(0.0, 1.0 - abs(distance_)); }

// Four neighbours of a row, of one channel.
#define STORE_FOUR(b_, first_, texel_) \
    for (int k = 0; k < 4; k += AT_ONCE) { \
        if (AT_ONCE == 4 || at.x + k < u_size.x) b_[(first_) + k / AT_ONCE] = PACKED(texel_, k, r); \
    }

void main() {
    int layer;
    ivec2 at;
    if (!find_tile(layer, at)) return;
    at += 4 * ivec2(gl_LocalInvocationID.x & 15u, gl_LocalInvocationID.x >> 4);
    if (at.x >= u_size.x || at.y >= u_size.y) return;

    vec2 place = (vec2(at) + 0.5) * u_pixel;
    vec2 away = away_from(b_fixations[u_first_image + layer], place), step_ = u_pixel * u_box;
    float level[16];
    float least = 100.0, most = 0.0;
#ifdef SERIES
    float e = length(away + 1.5 * step_), middle = log2(1.0 + e) + u_bias;
#endif
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
    }
    int last = last_level();
    least = min(least, float(last));
    int row_vectors = int(uint(u_size.x) / uint(AT_ONCE));
    ivec4 target = place_in(layer, at, row_vectors);
#ifdef HALVES
    // Two levels, and seldom a third. Stored as soon as they are made: few values are alive at once.
    int l = int(least);
    Surface coarse = surface(layer, min(l + 1, last), at), third = coarse;
    if (most > float(l + 1)) third = surface(layer, min(l + 2, last), at);
    for (int i = 0; i < 16; ++i) level[i] -= float(l);
#if TEXELS == 2
    Surface fine = surface(layer, l, at);
#define FINE_ROW(y_, c_) float at_0 = fine.at.c_ + y_ * fine.down.c_, right_0 = fine.right.c_ + y_ * fine.twist.c_
#define FINE(x, y, c_) (at_0 + float(x) * right_0)
#else
    Place p = place_of(layer, l, at);
    vec2 first = p.first;
    float per_pixel = p.per_pixel;
    bool two = l == 2;  // its pixels 2 and 3 lie between texels 1 and 2; else all lie between texels 0 and 1
    TEXEL row[12];      // filtered along x: of the first texels, and what the next ones add
    for (int j = 0; j < 3; ++j) {
        TEXEL texels[3];
        for (int i = 0; i < 3; ++i) texels[i] = texel_of(p, i, j);
        TEXEL left = texels[1] - texels[0], right = two ? texels[2] - texels[1] : left;
        TEXEL from = two ? texels[1] - right : texels[0];
        row[4 * j] = texels[0] + first.x * left;
        row[4 * j + 1] = texels[0] + (first.x + per_pixel) * left;
        row[4 * j + 2] = from + (first.x + 2.0 * per_pixel) * right;
        row[4 * j + 3] = from + (first.x + 3.0 * per_pixel) * right;
    }
    for (int x = 0; x < 4; ++x) {
        row[8 + x] -= row[4 + x];
        row[4 + x] -= row[x];
    }
#define FINE_ROW(y_, c_) float v = first.y + y_ * per_pixel, v_0 = two ? min(v, 1.0) : v, v_1 = v - v_0
#define FINE(x, y, c_) (row[x].c_ + v_0 * row[4 + x].c_ + (y < 2 ? 0.0 : v_1 * row[8 + x].c_))
#endif
#define STORE_CHANNEL(b_, first_, c_) \
    for (int y = 0; y < 4; ++y) { \
        FINE_ROW(float(y), c_); \
        float at_1 = coarse.at.c_ + float(y) * coarse.down.c_, right_1 = coarse.right.c_ + float(y) * coarse.twist.c_; \
        float at_2 = third.at.c_ + float(y) * third.down.c_ - at_1; \
        float right_2 = third.right.c_ + float(y) * third.twist.c_ - right_1; \
        float texel[4]; \
        for (int x = 0; x < 4; ++x) { \
            float share = level[4 * y + x], value = FINE(x, y, c_); \
            value += min(share, 1.0) * (at_1 + float(x) * right_1 - value); \
            texel[x] = (value + max(share - 1.0, 0.0) * (at_2 + float(x) * right_2)) * TO_STORED; \
        } \
        if (at.y + y < u_size.y) STORE_FOUR(b_, first_ + y * row_vectors, texel) \
    }
#else
    // Each level in its turn, for all pixels of the block: two levels, seldom three. Asked for at the end of the loop, as a
    // software renderer walks through the rest of one that every lane has left.
    TEXEL sum[16];
    for (int i = 0; i < 16; ++i) sum[i] = TEXEL(0.0);
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
#define STORE_CHANNEL(b_, first_, c_) \
    for (int y = 0; y < 4; ++y) { \
        float texel[4]; \
        for (int x = 0; x < 4; ++x) texel[x] = sum[4 * y + x].c_ * TO_STORED; \
        if (at.y + y < u_size.y) STORE_FOUR(b_, first_ + y * row_vectors, texel) \
    }
#endif
    STORE_CHANNELS(target)
}
