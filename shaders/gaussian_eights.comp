#version 430
// gaussian_level.comp for software renderers, fp32 to fp32 where rows are whole groups of eight: an invocation makes 4 x 2
// samples.
//
// FETCHED   loads.glsl: the source is a buffer texture
#include "binomial.glsl"
#include "pairs.glsl"
#include "loads.glsl"

layout(local_size_x = 8, local_size_y = 4) in;
#ifdef FETCHED
layout(binding = 1) uniform samplerBuffer b_source;
#else
layout(std430, binding = 1) readonly buffer Source { FOUR_FLOATS b_source[]; };
#endif
layout(std430, binding = 0) writeonly buffer Target { FOUR_FLOATS b_target[]; };

uniform ivec2 u_source_size;
uniform ivec2 u_size;
uniform ivec2 u_rows;   // first row made, and the one after the last
uniform ivec2 u_first;  // index of texel 0 of the first plane: source, target; negative if bound from a later row

// Four samples, smoothed along a row of the source.
vec4 across(int origin, int x, int y) {
    int from = origin + mirrored(y, u_source_size.y) * u_source_size.x;
    int at = (from >> 2) + 2 * x;
    vec4 left = LOAD4(b_source, at), right = LOAD4(b_source, at + 1);
    vec2 a = left.xy, b = left.zw, c = right.xy, d = right.zw;
    vec2 before = LOAD4(b_source, at - min(x, 1)).zw;
    bool last = 8 * x + 8 == u_source_size.x;
    float after = LOAD4(b_source, at + (last ? 1 : 2)).x;
    if (x == 0) before = vec2(b.x, a.y);
    if (last) after = d.x;
    vec4 outer = vec4(before.x, a.x, b.x, c.x) + vec4(b.x, c.x, d.x, after);
    return outer * 0.0625 + (vec4(before.y, a.y, b.y, c.y) + vec4(a.y, b.y, c.y, d.y)) * 0.25 + vec4(a.x, b.x, c.x, d.x) * 0.375;
}

void main() {
    int x = int(gl_GlobalInvocationID.x), y = u_rows.x + 2 * int(gl_GlobalInvocationID.y);
    if (4 * x >= u_size.x || y >= u_rows.y) return;
    int plane = int(gl_GlobalInvocationID.z);
    int origin = u_first.x + plane * u_source_size.x * u_source_size.y;
    vec4 rows[7];
    for (int i = 0; i < 7; ++i) rows[i] = across(origin, x, 2 * y + i - 2);
    int at = u_first.y + (plane * u_size.y + y) * u_size.x + 4 * x;
    b_target[at >> 2] = as_four((rows[0] + rows[4]) * 0.0625 + (rows[1] + rows[3]) * 0.25 + rows[2] * 0.375);
    if (y + 1 < u_rows.y) {
        vec4 below = (rows[2] + rows[6]) * 0.0625 + (rows[3] + rows[5]) * 0.25 + rows[4] * 0.375;
        b_target[(at + u_size.x) >> 2] = as_four(below);
    }
}
