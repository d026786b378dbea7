#version 430
// Log-polar map straight into a planar tensor: rows are rings, columns wedges.
// PER_WORD (words.glsl), CHANNELS
// WHOLE_ROWS      (place.glsl) an invocation makes the same word of every channel, so that one fetch serves them all
// RINGS_AT_ONCE   with WHOLE_ROWS: neighbouring rings that an invocation makes
#include "words.glsl"
#include "place.glsl"
#include "log_polar.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
uniform int u_first_plane;  // plane of the chunk's first element, counted from the texture's first layer

#if PER_WORD == 4
#define TO_STORED 255.0
#else
#define TO_STORED 1.0
#endif

#ifdef WHOLE_ROWS
// The same channel of the samples of one word.
#if PER_WORD == 1
#define GATHER(c) texel0.c
#elif PER_WORD == 2
#define GATHER(c) vec2(texel0.c, texel1.c)
#else
#define GATHER(c) (vec4(texel0.c, texel1.c, texel2.c, texel3.c) * TO_STORED)
#endif

void main() {
    int wedge = int(gl_GlobalInvocationID.x) * PER_WORD;
    if (wedge >= u_target_size.x) return;
    int image = int(gl_WorkGroupID.z) + u_first_plane / CHANNELS;
    uint row_words = uint(u_target_size.x / PER_WORD);
    uint plane_words = row_words * uint(u_target_size.y);
    vec2 centre = fixation_of(image);
    vec2 direction0 = b_wedges[wedge];
#if PER_WORD > 1
    vec2 direction1 = b_wedges[wedge + 1];
#endif
#if PER_WORD > 2
    vec2 direction2 = b_wedges[wedge + 2];
    vec2 direction3 = b_wedges[wedge + 3];
#endif
    // Even groups first, then odd ones: outer rings blend two levels and cost more than inner ones, and a software renderer
    // deals out workgroups in one long run a thread.
    int half_way = int(gl_NumWorkGroups.y + 1u) / 2;
    int group = int(gl_WorkGroupID.y);
    group = group < half_way ? 2 * group : 2 * (group - half_way) + 1;
    for (int i = 0; i < RINGS_AT_ONCE; ++i) {
        int ring = group * RINGS_AT_ONCE + i;
        if (ring >= u_target_size.y) return;
        vec2 radius_level = b_rings[ring];
        vec4 texel0 = log_polar(image, centre, radius_level, direction0);
#if PER_WORD > 1
        vec4 texel1 = log_polar(image, centre, radius_level, direction1);
#endif
#if PER_WORD > 2
        vec4 texel2 = log_polar(image, centre, radius_level, direction2);
        vec4 texel3 = log_polar(image, centre, radius_level, direction3);
#endif
        uint target = gl_WorkGroupID.z * uint(CHANNELS) * plane_words + uint(ring) * row_words + gl_GlobalInvocationID.x;
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
            int image = plane / CHANNELS;
            vec4 texel = log_polar(image, fixation_of(image), b_rings[p.at.y], b_wedges[p.at.x]);
            value[k] = TO_STORED * texel[plane - image * CHANNELS];
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
#endif
