#version 430
// Patches whose words lie over the ends of planes (an odd number of samples of a small dtype), or that are larger than a
// binding: any range of words of the planes.
// PER_WORD (words.glsl), CHANNELS, PATCH, BORDER_ZERO (patches.glsl)
#define ONE_CHANNEL
#include "words.glsl"
#include "place.glsl"
#include "patches.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
uniform int u_first_plane;  // of the chunk, counted from the texture's first image
uniform int u_budget;
uniform int u_first_site;

void main() {
    Place p = place();
    if (!p.inside) return;
    float value[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        value[k] = 0.0;
        if (holds(p, k)) {
            int plane = u_first_plane + int(p.plane);
            int index = plane / CHANNELS, channel = plane - index * CHANNELS;
            ASK_FOR(channel);
            Patch source = patch_at(u_first_site + index, index / u_budget);
            vec4 texel = source.exact ? on_texel(source, p.at) : between_texels(source, p.at);
            value[k] = channel == 0 ? texel.r : channel == 1 ? texel.g : channel == 2 ? texel.b : texel.a;
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
