#version 430
// Log-polar map rendered to a texture of wedges x rings, a layer an image.
#include "log_polar.glsl"
out vec4 f_texel;

void main() {
    ivec2 at = ivec2(gl_FragCoord.xy);
    f_texel = log_polar(gl_Layer, fixation_of(gl_Layer), b_rings[at.y], b_wedges[at.x]);
}
