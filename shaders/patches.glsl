// The patch at a site: PATCH x PATCH samples 2^level pixels apart, read from a mean pyramid.
// BORDER_ZERO: positions outside the image give 0; without it they are clamped to the edge. FETCHED, BUFFERED: trilinear.glsl

#include "trilinear.glsl"
layout(std430, binding = 1) readonly buffer Sites { float b_sites[]; };  // x, y, level of the whole batch
uniform vec2 u_size;   // (width, height)
uniform float u_last;  // level
uniform vec4 u_scale;  // a result is texel * scale + offset, by channel
uniform vec4 u_offset;

// Of a side, 2^-22: as far off may fp32 positions be. A centre no further from a whole or half pixel is there: patches of the
// grid meet texels exactly.
const float ROUNDING = 1.0 / 4194304.0;

struct Patch {
    vec2 centre;    // in pixels
    float stride;   // between samples
    Levels levels;  // that are read
    bool exact;     // every sample is a texel
    Level whole;    // the level they are of,
    ivec2 texel;    // and the one of sample (0, 0)
};

Patch patch_at(int site, int layer) {
    Patch p;
    vec2 at = vec2(b_sites[3 * site], b_sites[3 * site + 1]);
    precise vec2 pixel = at * u_size;
    vec2 near = roundEven(2.0 * pixel) * 0.5;
    p.centre = mix(pixel, near, lessThanEqual(abs(pixel - near), u_size * ROUNDING));
    float level = min(b_sites[3 * site + 2], 30.0);  // far beyond any image
    int fine = int(level);
    float between = level - float(fine);
    // A quotient may be off in its last places, also by a power of two: this one is made of its bits.
    float whole = float(1 << fine), part = uintBitsToFloat(uint(127 - fine) << 23);
    p.stride = between == 0.0 ? whole : whole * exp2(between);
    p.levels = levels_at(layer, min(level, u_last));
    // Texels of a level stand on a grid of whole steps only where the sides halve without a rest.
    vec2 begin = p.centre * part - 0.5 * float(PATCH), sides = u_size * part;
    p.exact = between == 0.0 && level <= u_last && begin == floor(begin) && sides == floor(sides);
    p.whole = level_at(layer, min(fine, int(u_last)));
    p.texel = ivec2(begin);
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

vec4 between_texels(Patch p, ivec2 at) { return shown(p, at, trilinear(p.levels, pixel_of(p, at) / u_size)); }

#ifdef FETCHED
// Of samples `at` and the next one of its row.
void between_texels(Patch p, ivec2 at, out vec4 one, out vec4 other) {
    ivec2 next = at + ivec2(1, 0);
    trilinear(p.levels, pixel_of(p, at) / u_size, pixel_of(p, next).x / u_size.x, one, other);
    one = shown(p, at, one);
    other = shown(p, next, other);
}
#endif

vec4 on_texel(Patch p, ivec2 at) {
    return shown(p, at, TEXEL_AT(p.whole, clamp(p.texel + at, ivec2(0), p.whole.size - 1)));
}
