#version 430
// Tiles of a foveated picture all of whose pixels lie between the same two levels, 3 and 4 or higher ones, where the sides
// of all levels are halves: an invocation makes 8 x 4 pixels, and a software renderer stores eight neighbours in two
// thirds of the time that it takes for twice four. In blocks of 4 x 4 levels must be so nearly quadratic that their third
// derivatives do not matter.
//
// PER_WORD, AT_ONCE and others: foveate_tiles.glsl
#define LANES 16
#define TILES 8
#include "foveate_tiles.glsl"

// Texels' centres lie between blocks of 8 x 4, but those of level 3 in their middles along a row.
void main() {
    int layer;
    ivec2 at;
    if (!find_tile(layer, at)) return;
    at += ivec2(8, 4) * ivec2(gl_LocalInvocationID.x & 7u, gl_LocalInvocationID.x >> 3);
    if (at.x >= u_size.x || at.y >= u_size.y) return;

    vec2 step_ = u_pixel * u_box;
    int last = last_level(), l = 0;
    float share[32];  // of the coarser level, 4 x 4 in the left half and in the right one
    for (int h = 0; h < 2; ++h) {
        vec2 away = away_from(b_fixations[u_first_image + layer], (vec2(at) + vec2(2 + 4 * h, 2)) * u_pixel);
        float e = length(away), level = log2(1.0 + e) + u_bias;
        if (h == 0) l = min(int(level), last);
        float some = l < last ? 1.0 : 0.0;
        // The second derivative is `across` the ray from the fixation, and `more` than that along it.
        float slope = INVERSE_LN2 / (1.0 + e) * some, across = slope / e, more = -slope / (1.0 + e) - across;
        vec2 ray = away / e, first = slope * ray * step_, second = 0.5 * (across + more * ray * ray) * step_ * step_;
        float mixed = more * ray.x * ray.y * step_.x * step_.y;
        level = (level - float(l)) * some;
        for (int y = 0; y < 4; ++y) {
            float down = float(y) - 1.5, even = level + down * (first.y + down * second.y), odd = first.x + down * mixed;
            float near = even + 0.25 * second.x, far = even + 2.25 * second.x;
            int row = 16 * h + 4 * y;
            share[row] = far - 1.5 * odd;
            share[row + 1] = near - 0.5 * odd;
            share[row + 2] = near + 0.5 * odd;
            share[row + 3] = far + 1.5 * odd;
        }
    }

    Place fine = place_of(layer, l, at), coarse = place_of(layer, min(l + 1, last), at);
    TEXEL texels[6], coarse_texels[4];
    for (int i = 0; i < 6; ++i) texels[i] = texel_of(fine, i % 3, i / 3);
    for (int i = 0; i < 4; ++i) coarse_texels[i] = texel_of(coarse, i & 1, i >> 1);
    bool two = l == 3;
    // The halves' middles, in texels from the centre of the one on their left.
    vec2 middle = fine.first.x + vec2(1.5, 5.5) * fine.per_pixel - vec2(0.0, two);
    vec2 coarse_middle = coarse.first.x + vec2(1.5, 5.5) * coarse.per_pixel;
    int row_vectors = int(uint(u_size.x) / uint(AT_ONCE));
    ivec4 target = place_in(layer, at, row_vectors);
#define BETWEEN(a, b, share_) ((a) + (share_) * ((b) - (a)))
#define STORE_CHANNEL(b_, first_, c_) \
    for (int y = 0; y < 4; ++y) { \
        float v = fine.first.y + float(y) * fine.per_pixel, w = coarse.first.y + float(y) * coarse.per_pixel; \
        float row[3], texel[8]; \
        for (int i = 0; i < 3; ++i) row[i] = BETWEEN(texels[i].c_, texels[3 + i].c_, v); \
        float left = BETWEEN(coarse_texels[0].c_, coarse_texels[2].c_, w); \
        float across = BETWEEN(coarse_texels[1].c_, coarse_texels[3].c_, w) - left; \
        for (int h = 0; h < 2; ++h) { \
            bool second = h == 1 && two; \
            float from = second ? row[1] : row[0], slope = second ? row[2] - row[1] : row[1] - row[0]; \
            float value = from + middle[h] * slope, rest = left + coarse_middle[h] * across - value; \
            slope *= fine.per_pixel; \
            float rest_slope = across * coarse.per_pixel - slope; \
            for (int x = 0; x < 4; ++x) { \
                float right = float(x) - 1.5, part = share[16 * h + 4 * y + x]; \
                texel[4 * h + x] = (value + right * slope + part * (rest + right * rest_slope)) * TO_STORED; \
            } \
        } \
        b_[first_ + y * row_vectors] = PACKED(texel, 0, r); \
    }
    STORE_CHANNELS(target)
}
