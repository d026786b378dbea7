// The patch at a site: PATCH x PATCH samples 2^level pixels apart, read from a mean pyramid.
// BORDER_ZERO: positions outside the image give 0; without it they are clamped to the edge. FETCHED, BUFFERED,
// PLANAR: trilinear.glsl
// SHARPER: u_bias is below 0, and samples may be further apart than texels of the coarser level that is read

#include "trilinear.glsl"
layout(std430, binding = 1) readonly buffer Sites { float b_sites[]; };  // x, y, level of the whole batch
uniform vec2 u_size;   // (width, height)
uniform float u_last;  // level
uniform float u_bias;  // levels that are read above the site's own
uniform vec4 u_scale;  // a result is texel * scale + offset, by channel
uniform vec4 u_offset;

// Of a side, 2^-22: as far off may fp32 positions be. A centre no further from a whole or half pixel is there: patches of the
// grid meet texels exactly.
const float ROUNDING = 1.0 / 4194304.0;

#ifdef FETCHED
// A level that a patch is read from. Places are so far from a texel nearby, as in large pictures fp32 is too coarse for
// where they are.
struct Along {
    Level level;
    ivec2 texel;
    vec2 share;  // from its centre to the patch's
    vec2 step_;  // texels from sample to sample
};
#endif

struct Patch {
    vec2 centre;   // in pixels
    float stride;  // between samples
#ifdef FETCHED
    Along fine, coarse;
    float share;  // of the coarse one
#else
    Levels levels;  // that are read
#endif
    bool exact;   // every sample is a texel
    Level whole;  // the level they are of,
    ivec2 texel;  // and the one of sample (0, 0)
};

// Where a place in [0, 1] is among `size` texels: whole ones, and the rest of one. As integers, 2^32 to a side: what is cut
// off is less than 2^-16 of a texel.
ivec2 texels_at(vec2 at, vec2 size, out vec2 rest) {
    uvec2 whole, part;
    umulExtended(uvec2(at * 2147483648.0), uvec2(2.0 * size), whole, part);
    rest = vec2(part >> 8) * (1.0 / 16777216.0);
    return ivec2(whole);
}

#ifdef FETCHED
Along along(Level level, vec2 at, vec2 moved, float stride) {
    Along a;
    vec2 texels = vec2(level.size) / u_size;  // to a pixel
    a.level = level;
    a.texel = texels_at(at, vec2(level.size), a.share);
    a.share += moved * texels - 0.5;
    a.step_ = stride * texels;
    return a;
}
#endif

Patch patch_at(int site, int layer) {
    Patch p;
    vec2 at = vec2(b_sites[3 * site], b_sites[3 * site + 1]), rest;
    ivec2 pixel = texels_at(at, u_size, rest);
    vec2 near = floor(2.0 * rest + 0.5) * 0.5, moved = near - rest;
    moved = mix(vec2(0.0), moved, lessThanEqual(abs(moved), u_size * ROUNDING));
    p.centre = vec2(pixel) + (rest + moved);
    float own = min(b_sites[3 * site + 2], 30.0), level = clamp(own + u_bias, 0.0, 30.0);  // 30 is far beyond any image
    int steps = int(own), fine = int(level);
    float rest_of_own = own - float(steps), between = level - float(fine);
    // A quotient may be off in its last places, also by a power of two: this one is made of its bits.
    float whole = float(1 << steps), part = uintBitsToFloat(uint(127 - steps) << 23);
    p.stride = rest_of_own == 0.0 ? whole : whole * exp2(rest_of_own);
    // Texels of a level stand on a grid of whole steps only where the sides halve without a rest.
    vec2 begin = p.centre * part - 0.5 * float(PATCH), sides = u_size * part;
    p.exact = rest_of_own == 0.0 && level == own && own <= u_last && begin == floor(begin) && sides == floor(sides);
    p.whole = level_at(layer, min(fine, int(u_last)));
    p.texel = ivec2(begin);
#ifdef FETCHED
    // Further apart, samples are as much outside; places are integers then, of sides to 2^16 and patches to 2^13.
    float stride = min(p.stride, 4.0 * max(u_size.x, u_size.y));
    p.fine = along(p.whole, at, moved, stride);
    p.coarse = along(coarse_at(layer, min(fine + 1, int(u_last))), at, moved, stride);
    p.share = level < u_last ? between : 0.0;
#else
    p.levels = levels_at(layer, min(level, u_last));
#endif
    return p;
}

vec2 pixel_of(Patch p, ivec2 at) { return p.centre + (vec2(at) - 0.5 * float(PATCH - 1)) * p.stride; }

vec4 shown(Patch p, ivec2 at, vec4 texel) {
#ifdef BORDER_ZERO
    vec2 pixel = pixel_of(p, at);
    if (any(lessThan(pixel, vec2(0.0))) || any(greaterThan(pixel, u_size))) return vec4(0.0);
#endif
    return texel * u_scale + u_offset;
}

#ifdef FETCHED
// Places are counted from a level's `texel`.
vec2 place_of(Along a, ivec2 at) { return a.share + (vec2(at) - 0.5 * float(PATCH - 1)) * a.step_; }

vec4 between_texels(Patch p, ivec2 at) {
    vec4 texel = bilinear(p.fine.level, p.fine.texel, place_of(p.fine, at));
    vec4 coarse = bilinear(p.coarse.level, p.coarse.texel, place_of(p.coarse, at));
    return shown(p, at, p.share > 0.0 ? mix(texel, coarse, p.share) : texel);
}

// Of samples `at` and the next one of its row, which are less than a texel of the coarse level apart: three of its columns
// serve both.
void between_texels(Patch p, ivec2 at, out vec4 one, out vec4 other) {
    ivec2 next = at + ivec2(1, 0);
    one = bilinear(p.fine.level, p.fine.texel, place_of(p.fine, at));
    other = bilinear(p.fine.level, p.fine.texel, place_of(p.fine, next));
    vec3 place = vec3(place_of(p.coarse, at), place_of(p.coarse, next).x);
    vec3 whole = floor(place), share = place - whole;
    ivec2 end = p.coarse.level.size - 1;
    ivec3 x = clamp(p.coarse.texel.x + int(whole.x) + ivec3(0, 1, 2), 0, end.x);
    ivec2 y = clamp(p.coarse.texel.y + int(whole.y) + ivec2(0, 1), 0, end.y);
    vec4 column[3];
    for (int k = 0; k < 3; ++k) {
        vec4 above = TEXEL_AT(p.coarse.level, ivec2(x[k], y[0])), below = TEXEL_AT(p.coarse.level, ivec2(x[k], y[1]));
        column[k] = mix(above, below, share.y);
    }
    if (p.share > 0.0) {
        one = mix(one, mix(column[0], column[1], share.x), p.share);
        float further = whole.z - whole.x;  // 2 where rounding puts a position on the texel that it is before
        vec4 left = further > 0.0 ? column[1] : column[0], after = further > 0.0 ? column[2] : column[1];
        other = mix(other, mix(left, after, further > 1.0 ? 1.0 : share.z), p.share);
    }
    one = shown(p, at, one);
    other = shown(p, next, other);
}
#else
vec4 between_texels(Patch p, ivec2 at) { return shown(p, at, trilinear(p.levels, pixel_of(p, at) / u_size)); }
#endif

vec4 on_texel(Patch p, ivec2 at) {
    return shown(p, at, TEXEL_AT(p.whole, clamp(p.texel + at, ivec2(0), p.whole.size - 1)));
}
