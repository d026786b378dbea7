#version 430
// A foveated picture for renderers whose texture units are software: an invocation makes a block of 4 x 4 pixels, fetches
// each texel under it once for all of them, and filters by itself. Less than half the time of foveate.comp on a CPU.
//
// PER_WORD, AT_ONCE (at_once.glsl): rows are whole vectors. CHANNELS, TO_STORED (foveate.glsl). BUFFERED (texels.glsl)
// SERIES   blocks are small against their distance from the fixation: one logarithm does for all of a block
// TEXELS   texels of a level, along a side, that a block may touch: 4 at any level, 3 from level 2 on, and 2 from level 3 on
//          where the sides of all levels are halves
#include "words.glsl"
#include "at_once.glsl"
#include "foveate.glsl"
#include "texels.glsl"

layout(local_size_x = 16, local_size_y = 2) in;
layout(std430, binding = 2) readonly buffer Tiles { int b_tiles[]; };  // of 64 x 8 pixels, numbered through the batch
uniform ivec4 u_first_stored;  // index in each binding of that channel of the texture's first image
uniform int u_first_tile;    // of the texture's tiles in b_tiles
uniform int u_tiles;
uniform ivec2 u_tile_counts;  // of an image
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

float tent(float distance_) { return max(0.0, 1.0 - abs(distance_)); }

void main() {
    int turn = int(gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x);
    if (turn >= u_tiles) return;
    int tile = b_tiles[u_first_tile + turn];
    int per_image = u_tile_counts.x * u_tile_counts.y;
    int image = tile / per_image, layer = image - u_first_image;
    tile -= image * per_image;
    int row = tile / u_tile_counts.x;
    ivec2 at = ivec2(64, 8) * ivec2(tile - row * u_tile_counts.x, row) + 4 * ivec2(gl_LocalInvocationID.xy);
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
    // Each level in its turn, for all pixels of the block: two levels, seldom three. Asked for at the end, as a software
    // renderer walks through the rest of a loop that every lane has left.
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
    int row_vectors = u_size.x / AT_ONCE;
    ivec4 target = u_first_stored + (layer * CHANNELS * u_size.y + at.y) * row_vectors + at.x / AT_ONCE;
    for (int y = 0; y < 4; ++y) {
        vec4 texel[4];
        for (int x = 0; x < 4; ++x) {
            texel[x] = vec4(0.0);
            texel[x].SWIZZLE = sum[4 * y + x] * TO_STORED;
        }
        for (int k = 0; k < 4; k += AT_ONCE) {
            if (at.y + y < u_size.y && at.x + k < u_size.x) {
                ivec4 vector = target + y * row_vectors + k / AT_ONCE;
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
}
