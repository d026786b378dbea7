#version 430
// Rings of a log-polar map rendered to a texture of wedges x rings, a layer an image.
// ROUND_TO_HALVES, ROUND_TO_COUNTS   what the canvas holds: how colours are rounded to it OpenGL leaves open, and some
//                                    hardware truncates
#include "log_polar.glsl"
#include "halves.glsl"
uniform int u_first_layer;  // of the source: it may have more than textures do
uniform int u_first_ring;
out vec4 f_texel;

void main() {
    ivec2 at = ivec2(gl_FragCoord.xy);
    int layer = u_first_layer + gl_Layer;
    vec4 texel = log_polar(layer, fixation_of(layer), b_rings[at.y + u_first_ring], b_wedges[at.x]);
#ifdef ROUND_TO_HALVES
    for (int c = 0; c < 4; ++c) texel[c] = from_half_bits(half_bits(texel[c]));
#elif defined(ROUND_TO_COUNTS)
    texel = roundEven(texel * 255.0) / 255.0;
#endif
    f_texel = texel;
}
