#version 430
// One level of an array texture to a planar buffer: channel k of a layer becomes plane k.
// PER_WORD (words.glsl), WHOLE_ROWS (place.glsl), CHANNELS: 1 to 4 planes a layer.
#include "words.glsl"
#include "place.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(binding = 0) uniform sampler2DArray t_level;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
uniform int u_level;
uniform int u_first_plane;  // plane of the chunk's first element, counted from the texture's first layer

void main() {
    Place p = place();
    if (!p.inside) return;
    float value[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        value[k] = 0.0;
        if (holds(p, k)) {
            int plane = u_first_plane + int(p.plane);
            int layer = plane / CHANNELS;
            vec4 texel = texelFetch(t_level, ivec3(p.at, layer), u_level);
            int channel = plane - layer * CHANNELS;
            // Written out: indexing a vector costs a software renderer dearly.
            value[k] = channel == 0 ? texel.r : channel == 1 ? texel.g : channel == 2 ? texel.b : texel.a;
        }
#if PER_WORD == 4
        value[k] *= 255.0;
#endif
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
