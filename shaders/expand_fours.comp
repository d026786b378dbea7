#version 430
// expand.comp for software renderers, of fp32 whose rows are whole groups of four: an invocation makes 4 x 2 texels, and
// widens each coarse row that they rest on once for all of them.
//
// SIGN   1.0 to rebuild (collapse), -1.0 to take away (Laplacian)
#define FETCHED
#include "pairs.glsl"
#include "loads.glsl"

layout(local_size_x = 16, local_size_y = 4) in;
layout(std430, binding = 0) writeonly buffer Target { FOUR_FLOATS b_target[]; };
layout(binding = 1) uniform samplerBuffer b_fine;
layout(binding = 2) uniform samplerBuffer b_coarse;

uniform ivec2 u_size;
uniform ivec2 u_coarse_size;
uniform ivec2 u_rows;   // first row made, even, and the one after the last
uniform ivec3 u_first;  // index of texel 0 of the first plane: target, fine, coarse; negative if bound from a later row
#include "widened.glsl"

void make(int at, vec4 coarse) {
    b_target[(u_first.x + at) >> 2] = as_four(LOAD4(b_fine, (u_first.y + at) >> 2) + SIGN * coarse);
}

void main() {
    int x = 4 * int(gl_GlobalInvocationID.x), y = u_rows.x + 2 * int(gl_GlobalInvocationID.y);
    if (x >= u_size.x || y >= u_rows.y) return;
    int plane = int(gl_GlobalInvocationID.z), at = (plane * u_size.y + y) * u_size.x + x;
    int n = u_coarse_size.x, origin = u_first.z + plane * n * u_coarse_size.y, j = y >> 1, end = u_coarse_size.y - 1;
    vec4 p = widened(origin + (j == 0 ? min(1, end) : j - 1) * n, x), q = widened(origin + j * n, x);
    vec4 r = widened(origin + min(j + 1, end) * n, x);
    make(at, (p + r) * 0.125 + q * 0.75);
    if (y + 1 < u_rows.y) make(at + u_size.x, (q + r) * 0.5);
}
