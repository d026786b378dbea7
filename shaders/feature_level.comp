#version 430
// A level of a Gaussian pyramid beside the square of its Laplacian band, for feature_scales.comp to read both at once.
//
// LAST   there is no coarser level, and so no band: 0
#include "expansion.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { vec2 b_target[]; };
layout(std430, binding = 1) readonly buffer Fine { float b_fine[]; };
layout(std430, binding = 2) readonly buffer Coarse { float b_coarse[]; };

uniform ivec2 u_size;
uniform ivec2 u_coarse_size;
uniform int u_first_row;
uniform ivec3 u_first;  // index of texel 0 of the first plane: target, fine, coarse; negative if bound from a later row

void main() {
    int x = int(gl_GlobalInvocationID.x);
    if (x >= u_size.x) return;
    int y = u_first_row + int(gl_GlobalInvocationID.y), plane = int(gl_GlobalInvocationID.z);
    int at = plane * u_size.x * u_size.y + y * u_size.x + x;
    float value = b_fine[u_first.y + at], band = 0.0;
#ifndef LAST
    ivec3 columns = taps(x, u_coarse_size.x), rows = taps(y, u_coarse_size.y);
    vec3 wx = weights(x), wy = weights(y);
    int origin = u_first.z + plane * u_coarse_size.x * u_coarse_size.y;
    float sum = 0.0;
    for (int j = 0; j < 3; ++j) {
        int row = origin + rows[j] * u_coarse_size.x;
        float part = 0.0;
        for (int i = 0; i < 3; ++i) part += wx[i] * b_coarse[row + columns[i]];
        sum += wy[j] * part;
    }
    band = value - sum;
#endif
    b_target[u_first.x + at] = vec2(value, band * band);
}
