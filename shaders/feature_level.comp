#version 430
// A level of a Gaussian pyramid beside the square of its Laplacian band, for feature_scales.comp to read both at once.
//
// LAST      there is no coarser level, and so no band: 0
// FETCHED   loads.glsl: sources are buffer textures
// ALIGNED   rows are whole groups of four: an invocation makes 4 x 2 texels
#include "expansion.glsl"
#include "pairs.glsl"
#include "loads.glsl"

#ifdef FETCHED
layout(binding = 1) uniform samplerBuffer b_fine;
layout(binding = 2) uniform samplerBuffer b_coarse;
#else
#ifdef ALIGNED
layout(std430, binding = 1) readonly buffer Fine { FOUR_FLOATS b_fine[]; };
#else
layout(std430, binding = 1) readonly buffer Fine { float b_fine[]; };
#endif
layout(std430, binding = 2) readonly buffer Coarse { float b_coarse[]; };
#endif

uniform ivec2 u_size;
uniform ivec2 u_coarse_size;
uniform ivec2 u_rows;   // first row made, even, and the one after the last
uniform ivec3 u_first;  // index of texel 0 of the first plane: target, fine, coarse; negative if bound from a later row

#ifdef ALIGNED
layout(local_size_x = 16, local_size_y = 4) in;
layout(std430, binding = 0) writeonly buffer Target { FOUR_FLOATS b_target[]; };

#include "widened.glsl"

void make(int at, vec4 coarse) {
    vec4 value = LOAD4(b_fine, (u_first.y + at) >> 2);
#ifdef LAST
    vec4 energy = vec4(0.0);
#else
    vec4 band = value - coarse, energy = band * band;
#endif
    int to = (u_first.x + at) >> 1;
    b_target[to] = as_four(vec4(value.x, energy.x, value.y, energy.y));
    b_target[to + 1] = as_four(vec4(value.z, energy.z, value.w, energy.w));
}

void main() {
    int x = 4 * int(gl_GlobalInvocationID.x), y = u_rows.x + 2 * int(gl_GlobalInvocationID.y);
    if (x >= u_size.x || y >= u_rows.y) return;
    int plane = int(gl_GlobalInvocationID.z), at = (plane * u_size.y + y) * u_size.x + x;
#ifdef LAST
    vec4 p = vec4(0.0), q = p, r = p;
#else
    int n = u_coarse_size.x, origin = u_first.z + plane * n * u_coarse_size.y, j = y >> 1, end = u_coarse_size.y - 1;
    vec4 p = widened(origin + (j == 0 ? min(1, end) : j - 1) * n, x), q = widened(origin + j * n, x);
    vec4 r = widened(origin + min(j + 1, end) * n, x);
#endif
    make(at, (p + r) * 0.125 + q * 0.75);
    if (y + 1 < u_rows.y) make(at + u_size.x, (q + r) * 0.5);
}
#else
layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { vec2 b_target[]; };

void main() {
    int x = int(gl_GlobalInvocationID.x);
    if (x >= u_size.x) return;
    int y = u_rows.x + int(gl_GlobalInvocationID.y), plane = int(gl_GlobalInvocationID.z);
    int at = plane * u_size.x * u_size.y + y * u_size.x + x;
    float value = LOAD1(b_fine, u_first.y + at), band = 0.0;
#ifndef LAST
    ivec3 columns = taps(x, u_coarse_size.x), rows = taps(y, u_coarse_size.y);
    vec3 wx = weights(x), wy = weights(y);
    int origin = u_first.z + plane * u_coarse_size.x * u_coarse_size.y;
    float sum = 0.0;
    for (int j = 0; j < 3; ++j) {
        int row = origin + rows[j] * u_coarse_size.x;
        float part = 0.0;
        for (int i = 0; i < 3; ++i) part += wx[i] * LOAD1(b_coarse, row + columns[i]);
        sum += wy[j] * part;
    }
    band = value - sum;
#endif
    b_target[u_first.x + at] = vec2(value, band * band);
}
#endif
