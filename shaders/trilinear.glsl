// Trilinear samples of a mean pyramid.
// FETCHED   filtered here in fp32, from single texels: software renderers filter 8-bit textures with weights of 8 bits, off
//           by more than a count, and fetch faster than they filter. Always so from a buffer (texels.glsl: BUFFERED, PLANAR).
#include "texels.glsl"

#ifdef FETCHED
// `place` counts texels from the centre of one.
vec4 bilinear(Level level, ivec2 texel, vec2 place) {
    vec2 whole = floor(place), share = place - whole;
    ivec2 first = clamp(texel + ivec2(whole), ivec2(0), level.size - 1);
    ivec2 second = clamp(texel + ivec2(whole) + 1, ivec2(0), level.size - 1);
    vec4 left = mix(TEXEL_AT(level, first), TEXEL_AT(level, ivec2(first.x, second.y)), share.y);
    vec4 right = mix(TEXEL_AT(level, ivec2(second.x, first.y)), TEXEL_AT(level, second), share.y);
    return mix(left, right, share.x);
}

// The same from the first texel's.
vec4 bilinear(Level level, vec2 place) {
    return bilinear(level, ivec2(0), clamp(place, vec2(-1.0), vec2(level.size)));  // far positions are no integers
}

// What samples of one layer and level have in common.
struct Levels {
    Level fine, coarse;
    float share;  // of the coarse one
};

Levels levels_at(int layer, float level) {
    Levels l;
    level = min(level, float(last_level()));
    int fine = int(level);
    l.share = level - float(fine);
    l.fine = level_at(layer, fine);
    l.coarse = coarse_at(layer, min(fine + 1, last_level()));
    return l;
}

vec4 trilinear(Levels levels, vec2 at) {
    vec4 fine = bilinear(levels.fine, at * vec2(levels.fine.size) - 0.5);
    vec4 coarse = bilinear(levels.coarse, at * vec2(levels.coarse.size) - 0.5);
    return levels.share > 0.0 ? mix(fine, coarse, levels.share) : fine;
}
#else
struct Levels {
    float layer, level;
};

Levels levels_at(int layer, float level) { return Levels(float(layer), level); }

vec4 trilinear(Levels levels, vec2 at) { return textureLod(t_pyramid, vec3(at, levels.layer), levels.level); }
#endif
