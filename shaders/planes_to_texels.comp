#version 430
// Planar buffer to one level of a texture: plane k of a layer becomes channel k.
//
// BUFFERED   the texture is a buffer (texels.glsl); without it, an array texture
// PER_WORD   elements in a word of the source (words.glsl)
// CHANNELS   1 to 4 planes a layer
#include "words.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) readonly buffer Plane0 { uint b_plane0[]; };
layout(std430, binding = 1) readonly buffer Plane1 { uint b_plane1[]; };
layout(std430, binding = 2) readonly buffer Plane2 { uint b_plane2[]; };
layout(std430, binding = 3) readonly buffer Plane3 { uint b_plane3[]; };
#ifdef BUFFERED
layout(binding = 0) writeonly uniform imageBuffer i_texels;
uniform int u_start;   // where the level begins
uniform int u_height;  // of the level
#else
layout(binding = 0) writeonly uniform image2DArray i_level;
#endif

uniform ivec2 u_size;        // of the rows in this chunk
uniform int u_first_row;
uniform int u_first_layer;
uniform uint u_layer_stride;  // elements from one layer to the next within a binding
uniform uvec4 u_first;        // index of this chunk's first element in each binding

float texel(uint bits) {
    float v = to_float(bits);
#if PER_WORD == 4
    v /= 255.0;
#endif
    return v;
}

void main() {
    uvec3 id = gl_GlobalInvocationID;
    if (id.x >= uint(u_size.x)) return;
    uvec4 from = u_first + id.z * u_layer_stride + id.y * uint(u_size.x) + id.x;
    vec4 value = vec4(0.0, 0.0, 0.0, 1.0);
    value.r = texel(ELEMENT(b_plane0, from.x));
#if CHANNELS > 1
    value.g = texel(ELEMENT(b_plane1, from.y));
#endif
#if CHANNELS > 2
    value.b = texel(ELEMENT(b_plane2, from.z));
#endif
#if CHANNELS > 3
    value.a = texel(ELEMENT(b_plane3, from.w));
#endif
    ivec3 to = ivec3(id) + ivec3(0, u_first_row, u_first_layer);
#ifdef BUFFERED
    imageStore(i_texels, u_start + (to.z * u_height + to.y) * u_size.x + to.x, value);
#else
    imageStore(i_level, to, value);
#endif
}
