#version 430
// One level of a mip chain, rendered: each fragment reduces its footprint of the level above, all channels at once.
// REDUCE_MEAN, REDUCE_MAX or REDUCE_MIN; TAPS_X, TAPS_Y as in reduce_level.comp.
layout(binding = 0) uniform sampler2DArray t_above;
uniform ivec2 u_target_size;  // t_above is clamped to the one level above, so that its level 0 is that level
out vec4 f_texel;

#include "polyphase.glsl"

vec4 above(ivec2 origin, int x, int y) { return texelFetch(t_above, ivec3(origin + ivec2(x, y), gl_Layer), 0); }

#ifndef REDUCE_MEAN
#include "nan.glsl"
#endif

void main() {
    ivec2 at = ivec2(gl_FragCoord.xy);
    ivec2 origin = 2 * at;
#ifdef REDUCE_MEAN
    vec3 wx = weights(at.x, u_target_size.x, TAPS_X);
    vec3 wy = weights(at.y, u_target_size.y, TAPS_Y);
    vec4 sum = vec4(0.0);
    for (int y = 0; y < TAPS_Y; ++y) {
        vec4 row = vec4(0.0);
        for (int x = 0; x < TAPS_X; ++x) row += wx[x] * above(origin, x, y);
        sum += wy[y] * row;
    }
    f_texel = sum;
#else
    vec4 best = above(origin, 0, 0);
    for (int y = 0; y < TAPS_Y; ++y)
        for (int x = 0; x < TAPS_X; ++x) best = reduce(best, above(origin, x, y));
    f_texel = best;
#endif
}
