#version 430
// The luma of images, in [0, 1]: Rec. 601's weights, or the grey channel as it is.
//
// PER_WORD (words.glsl), CHANNELS (alpha included), GROUPS, TEXELS (colour.glsl), ALIGNED (tile.glsl)
#include "words.glsl"
#include "tile.glsl"
#include "colour.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { MADE b_target[]; };

uniform ivec2 u_size;
uniform int u_first_row;
uniform int u_target_first;

void main() {
    int x = int(gl_GlobalInvocationID.x) * 4;
    if (x >= u_size.x) return;
    int y = u_first_row + int(gl_GlobalInvocationID.y), image = int(gl_GlobalInvocationID.z);
    int area = u_size.x * u_size.y, at = y * u_size.x + x;
    Colour c = colour(image * CHANNELS * area + at, u_size.x - 1 - x);
    STORE(b_target, u_target_first + image * area + at, x, u_size.x, luma_of(c))
}
