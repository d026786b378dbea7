#version 430
// Planar buffer to one level of a texture: plane k of a layer becomes channel k.
//
// BUFFERED   the texture is a buffer (texels.glsl); without it, an array texture
// PER_WORD, BFLOAT16   of the source (words.glsl)
// CHANNELS   1 to 4 planes a layer
#include "words.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) readonly buffer Plane0 { uint b_plane0[]; };
layout(std430, binding = 1) readonly buffer Plane1 { uint b_plane1[]; };
layout(std430, binding = 2) readonly buffer Plane2 { uint b_plane2[]; };
layout(std430, binding = 3) readonly buffer Plane3 { uint b_plane3[]; };
#ifdef BUFFERED
#ifdef BFLOAT16
layout(binding = 0) writeonly uniform uimageBuffer i_texels;
#define TEXEL uvec4
#else
layout(binding = 0) writeonly uniform imageBuffer i_texels;
#endif
uniform int u_start;   // where the level begins
uniform int u_height;  // of the level
#else
layout(binding = 0) writeonly uniform image2DArray i_level;
#endif
#ifndef TEXEL
#define TEXEL vec4
#endif

uniform ivec2 u_size;        // of the rows in this chunk
uniform int u_first_row;
uniform int u_first_layer;
uniform uint u_layer_stride;  // elements from one layer to the next within a binding
uniform uvec4 u_first;        // index of this chunk's first element in each binding

#if defined(BUFFERED) && defined(BFLOAT16)
uint texel(uint bits) { return bits; }  // as they are: no format of a texture's knows bfloat16
#elif PER_WORD == 4
float texel(uint bits) { return to_float(bits) / 255.0; }
#else
float texel(uint bits) { return to_float(bits); }
#endif

void main() {
    uvec3 id = gl_GlobalInvocationID;
    if (id.x >= uint(u_size.x)) return;
    uvec4 from = u_first + id.z * u_layer_stride + id.y * uint(u_size.x) + id.x;
    TEXEL value = TEXEL(0, 0, 0, 1);
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
