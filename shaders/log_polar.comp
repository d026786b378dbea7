#version 430
// Log-polar map straight into a planar tensor: rows are rings, columns wedges.
// PER_WORD (words.glsl), AT_ONCE (at_once.glsl), CHANNELS
// WHOLE_ROWS      (place.glsl) an invocation makes the same vector of every channel, so that one fetch serves them all
// RINGS_AT_ONCE   with WHOLE_ROWS: neighbouring rings that an invocation makes
#ifndef WHOLE_ROWS
#define ONE_CHANNEL
#endif
#include "words.glsl"
#include "at_once.glsl"
#include "place.glsl"
#include "log_polar.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { STORED b_target[]; };
uniform int u_first_plane;  // plane of the chunk's first element, counted from the texture's first layer

#if PER_WORD == 4
#define TO_STORED 255.0
#else
#define TO_STORED 1.0
#endif

#ifdef WHOLE_ROWS
void main() {
    int wedge = int(gl_GlobalInvocationID.x) * AT_ONCE;
    if (wedge >= u_target_size.x) return;
    int image = int(gl_WorkGroupID.z) + u_first_plane / CHANNELS;
    uint row_vectors = uint(u_target_size.x) / uint(AT_ONCE), plane_vectors = row_vectors * uint(u_target_size.y);
    vec2 centre = fixation_of(image);
    vec2 direction[AT_ONCE];
    for (int k = 0; k < AT_ONCE; ++k) direction[k] = b_wedges[wedge + k];
    // Even groups first, then odd ones: outer rings blend two levels and cost more than inner ones, and a software renderer
    // deals out workgroups in one long run a thread.
    int half_way = int(gl_NumWorkGroups.y + 1u) / 2;
    int group = int(gl_WorkGroupID.y);
    group = group < half_way ? 2 * group : 2 * (group - half_way) + 1;
    for (int i = 0; i < RINGS_AT_ONCE; ++i) {
        int ring = group * RINGS_AT_ONCE + i;
        if (ring >= u_target_size.y) return;
        vec2 radius_level = b_rings[ring];
        vec4 texel[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) texel[k] = log_polar(image, centre, radius_level, direction[k]) * TO_STORED;
        uint target = gl_WorkGroupID.z * uint(CHANNELS) * plane_vectors + uint(ring) * row_vectors + gl_GlobalInvocationID.x;
        b_target[target] = PACKED(texel, 0, r);
#if CHANNELS > 1
        b_target[target + plane_vectors] = PACKED(texel, 0, g);
#endif
#if CHANNELS > 2
        b_target[target + 2u * plane_vectors] = PACKED(texel, 0, b);
#endif
#if CHANNELS > 3
        b_target[target + 3u * plane_vectors] = PACKED(texel, 0, a);
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
            ASK_FOR(plane - image * CHANNELS);
            vec4 texel = log_polar(image, fixation_of(image), b_rings[p.at.y], b_wedges[p.at.x]);
            value[k] = TO_STORED * texel[plane - image * CHANNELS];
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
#endif
