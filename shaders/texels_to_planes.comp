#version 430
// One level of an array texture to a planar buffer: channel k of a layer becomes plane k.
// PER_WORD (words.glsl), WHOLE_ROWS (place.glsl), CHANNELS: 1 to 4 planes a layer.
// BAND: the level is some rows of the planes. What else is in their first and last words stays.
#include "words.glsl"
#include "place.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) uniform sampler2DArray t_level;
#ifdef BAND
uniform ivec2 u_rows;  // first, and the one after the last
layout(std430, binding = 0) buffer Target { uint b_target[]; };
#else
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
#endif
uniform int u_level;
uniform int u_first_plane;  // plane of the chunk's first element, counted from the texture's first layer

void main() {
    Place p = place();
    if (!p.inside) return;
    float value[PER_WORD];
#ifdef BAND
    uint made = 0u;  // bits of the word
#endif
    for (int k = 0; k < PER_WORD; ++k) {
        value[k] = 0.0;
        bool here = holds(p, k);
        ivec2 at = p.at;
#ifdef BAND
        here = here && at.y >= u_rows.x && at.y < u_rows.y;
        at.y -= u_rows.x;
        if (here) made |= (~0u >> (32 - 32 / PER_WORD)) << (k * 32 / PER_WORD);
#endif
        if (here) {
            int plane = u_first_plane + int(p.plane);
            int layer = plane / CHANNELS;
            vec4 texel = texelFetch(t_level, ivec3(at, layer), u_level);
            int channel = plane - layer * CHANNELS;
            // Written out: indexing a vector costs a software renderer dearly.
            value[k] = channel == 0 ? texel.r : channel == 1 ? texel.g : channel == 2 ? texel.b : texel.a;
        }
#if PER_WORD == 4
        value[k] *= 255.0;
#endif
        advance(p);
    }
#ifdef BAND
    if (made != 0u) b_target[p.word] = (b_target[p.word] & ~made) | (pack(VALUES_OF(value)) & made);
#else
    b_target[p.word] = pack(VALUES_OF(value));
#endif
}
