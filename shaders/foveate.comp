#version 430
// A picture whose sharpness falls with eccentricity: each pixel reads the mean pyramid at its own place and its own level,
// straight into a planar tensor.
//
// PER_WORD (words.glsl), CHANNELS, TO_STORED (foveate.glsl)
// WHOLE_ROWS    (place.glsl) an invocation makes the same word of every channel, so that one fetch serves them all
// ANISOTROPIC   footprints are u_anisotropy times as long along the radius as across it
// PROBES        with ANISOTROPIC: they are sampled here, as foveate.py does it; without it, by the texture unit. llvmpipe's
//               reads level 0 whatever the footprint, where a compute shader asks
// FETCHED, BUFFERED, PLANAR   trilinear.glsl
#ifndef WHOLE_ROWS
#define ONE_CHANNEL
#endif
#include "words.glsl"
#include "place.glsl"
#include "foveate.glsl"
#include "trilinear.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
uniform int u_first_plane;  // of the chunk's first element, counted from the texture's first image
#ifdef ANISOTROPIC
uniform float u_anisotropy;
#endif

#if defined(PLANAR) && !defined(ANISOTROPIC)
// Where the centre of a pixel is in a level: beside which texel, and how far from its centre. In integers, for in fp32 it
// would be as far off as a side is long.
vec2 beside(Level l, int level, ivec2 at, out ivec2 texel) {
    ivec2 top = top_size();
    texel = at >> level;
    ivec2 rest = 2 * l.size * (at - (texel << level)) + l.size - 2 * (top - (l.size << level)) * texel;
    return vec2(rest) / vec2(2 * top) - 0.5;
}

vec4 between_levels(int layer, float level, ivec2 at) {
    level = min(level, float(last_level()));
    int fine = int(level), coarse = min(fine + 1, last_level());
    Level above = level_at(layer, fine), below = coarse_at(layer, coarse);
    ivec2 texel;
    vec2 place = beside(above, fine, at, texel);
    vec4 one = bilinear(above, texel, place);
    place = beside(below, coarse, at, texel);
    vec4 other = bilinear(below, texel, place);
    float share = level - float(fine);
    return share > 0.0 ? mix(one, other, share) : one;
}
#endif

vec4 foveated(int layer, vec2 fixation, ivec2 at) {
    vec2 place = (vec2(at) + 0.5) * u_pixel;
    vec2 away = away_from(fixation, place);
    float level = level_at(away);
#ifdef ANISOTROPIC
    float e = length(away), side = exp2(min(level, 64.0));  // no infinity, of which a direction along an axis would make NaN
#ifdef PROBES
    vec2 step_ = e > 0.0 ? away / e * side * u_pixel : vec2(0.0);
    float probes = ceil(u_anisotropy);
    Levels levels = levels_at(layer, max(level - log2(probes), 0.0));
    vec4 sum = vec4(0.0);
    for (float probe = 1.0; probe <= probes; ++probe) sum += trilinear(levels, place + step_ * (probe / (probes + 1.0) - 0.5));
    return sum / probes * TO_STORED;
#else
    vec2 radius = e > 0.0 ? away / e : vec2(1.0, 0.0);
    vec2 across = vec2(-radius.y, radius.x) * (side / u_anisotropy);
    return textureGrad(t_pyramid, vec3(place, layer), radius * side * u_pixel, across * u_pixel) * TO_STORED;
#endif
#elif defined(PLANAR)
    return between_levels(layer, level, at) * TO_STORED;
#else
    return trilinear(levels_at(layer, level), place) * TO_STORED;
#endif
}

#ifdef WHOLE_ROWS
#if PER_WORD == 1
#define GATHER(c) texel[0].c
#elif PER_WORD == 2
#define GATHER(c) vec2(texel[0].c, texel[1].c)
#else
#define GATHER(c) vec4(texel[0].c, texel[1].c, texel[2].c, texel[3].c)
#endif

void main() {
    ivec2 at = ivec2(int(gl_GlobalInvocationID.x) * PER_WORD, gl_WorkGroupID.y);
    if (at.x >= u_target_size.x) return;
    int layer = int(gl_WorkGroupID.z) + u_first_plane / CHANNELS;
    vec2 fixation = b_fixations[u_first_image + layer];
    vec4 texel[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) texel[k] = foveated(layer, fixation, at + ivec2(k, 0));
    uint row_words = uint(u_target_size.x / PER_WORD), plane_words = row_words * uint(u_target_size.y);
    uint target = gl_WorkGroupID.z * uint(CHANNELS) * plane_words + uint(at.y) * row_words + gl_GlobalInvocationID.x;
    b_target[target] = pack(GATHER(r));
#if CHANNELS > 1
    b_target[target + plane_words] = pack(GATHER(g));
#endif
#if CHANNELS > 2
    b_target[target + 2u * plane_words] = pack(GATHER(b));
#endif
#if CHANNELS > 3
    b_target[target + 3u * plane_words] = pack(GATHER(a));
#endif
}

#else

void main() {
    Place p = place();
    if (!p.inside) return;
    float value[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        value[k] = 0.0;
        if (holds(p, k)) {
            int plane = u_first_plane + int(p.plane);
            int layer = plane / CHANNELS, channel = plane - layer * CHANNELS;
            ASK_FOR(channel);
            vec4 texel = foveated(layer, b_fixations[u_first_image + layer], p.at);
            value[k] = channel == 0 ? texel.r : channel == 1 ? texel.g : channel == 2 ? texel.b : texel.a;
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
#endif
