// Trilinear samples of a mean pyramid.
// FETCHED   filtered here in fp32, from single texels: software renderers filter 8-bit textures with weights of 8 bits, off
//           by more than a count, and fetch faster than they filter. Always so from a buffer (texels.glsl: BUFFERED).
#include "texels.glsl"

#ifdef FETCHED
// `place` counts texels, the first one's centre being 0.
vec4 bilinear(Level level, vec2 place) {
    place = clamp(place, vec2(-1.0), vec2(level.size));  // far positions are no integers
    vec2 whole = floor(place), share = place - whole;
    ivec2 first = clamp(ivec2(whole), ivec2(0), level.size - 1);
    ivec2 second = clamp(ivec2(whole) + 1, ivec2(0), level.size - 1);
    vec4 left = mix(TEXEL_AT(level, first), TEXEL_AT(level, ivec2(first.x, second.y)), share.y);
    vec4 right = mix(TEXEL_AT(level, ivec2(second.x, first.y)), TEXEL_AT(level, second), share.y);
    return mix(left, right, share.x);
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
    l.coarse = level_at(layer, min(fine + 1, last_level()));
    return l;
}

vec4 trilinear(Levels levels, vec2 at) {
    vec4 fine = bilinear(levels.fine, at * vec2(levels.fine.size) - 0.5);
    vec4 coarse = bilinear(levels.coarse, at * vec2(levels.coarse.size) - 0.5);
    return levels.share > 0.0 ? mix(fine, coarse, levels.share) : fine;
}

// The same of two samples in a row that are less than a texel of the coarse level apart, the other one at `right`: three of
// its columns serve both.
void trilinear(Levels levels, vec2 at, float right, out vec4 one, out vec4 other) {
    vec2 fine = vec2(levels.fine.size), coarse = vec2(levels.coarse.size);
    one = bilinear(levels.fine, at * fine - 0.5);
    other = bilinear(levels.fine, vec2(right, at.y) * fine - 0.5);
    vec3 place = clamp(vec3(at, right) * coarse.xyx - 0.5, vec3(-1.0), coarse.xyx);
    vec3 whole = floor(place), share = place - whole;
    ivec3 x = clamp(int(whole.x) + ivec3(0, 1, 2), 0, levels.coarse.size.x - 1);
    ivec2 y = clamp(int(whole.y) + ivec2(0, 1), 0, levels.coarse.size.y - 1);
    vec4 column[3];
    for (int k = 0; k < 3; ++k) {
        column[k] = mix(TEXEL_AT(levels.coarse, ivec2(x[k], y[0])), TEXEL_AT(levels.coarse, ivec2(x[k], y[1])), share.y);
    }
    if (levels.share > 0.0) {
        one = mix(one, mix(column[0], column[1], share.x), levels.share);
        float further = whole.z - whole.x;  // 2 where rounding puts a position on the texel that it is before
        vec4 left = further > 0.0 ? column[1] : column[0], after = further > 0.0 ? column[2] : column[1];
        other = mix(other, mix(left, after, further > 1.0 ? 1.0 : share.z), levels.share);
    }
}
#else
struct Levels {
    float layer, level;
};

Levels levels_at(int layer, float level) { return Levels(float(layer), level); }

vec4 trilinear(Levels levels, vec2 at) { return textureLod(t_pyramid, vec3(at, levels.layer), levels.level); }
#endif
