// One sample of the log-polar map. The tables hold what does not depend on the picture, computed in double precision.
// BORDER_ZERO: positions outside the image give 0; without it they are clamped to the edge. FETCHED, BUFFERED,
// PLANAR: trilinear.glsl

#include "trilinear.glsl"
layout(std430, binding = 1) readonly buffer Rings { vec2 b_rings[]; };          // radius / longer side, level
layout(std430, binding = 2) readonly buffer Wedges { vec2 b_wedges[]; };        // cos, sin
layout(std430, binding = 3) readonly buffer Fixations { vec2 b_fixations[]; };  // one a layer of the whole batch
uniform vec2 u_aspect;  // longer side / (width, height)
uniform int u_first_image;

vec2 fixation_of(int layer) { return b_fixations[layer + u_first_image]; }

vec4 log_polar(int layer, vec2 fixation, vec2 radius_level, vec2 direction) {
    vec2 at = fixation + radius_level.x * u_aspect * direction;
#ifdef BORDER_ZERO
    if (any(lessThan(at, vec2(0.0))) || any(greaterThan(at, vec2(1.0)))) return vec4(0.0);
#endif
    return trilinear(levels_at(layer, radius_level.y), at);
}
