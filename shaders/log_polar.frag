#version 430
// Rings of a log-polar map rendered to a texture of wedges x rings, a layer an image.
#include "log_polar.glsl"
uniform int u_first_layer;  // of the source: it may have more than textures do
uniform int u_first_ring;
out vec4 f_texel;

void main() {
    ivec2 at = ivec2(gl_FragCoord.xy);
    int layer = u_first_layer + gl_Layer;
    f_texel = log_polar(layer, fixation_of(layer), b_rings[at.y + u_first_ring], b_wedges[at.x]);
}
