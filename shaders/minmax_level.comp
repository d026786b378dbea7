#version 430
// One level of a Hi-Z chain by the texture unit's min/max reduction filter: a bilinear footprint at a texel corner is a 2x2
// box, and the unit returns its maximum (minimum) in one fetch. Odd sides take a second fetch one texel on: the
// footprints overlap, which a maximum does not mind.
// TAPS_X, TAPS_Y: 2 for an even side, 3 for an odd one, 1 where the side is 1 already. REDUCE_MAX or REDUCE_MIN.
layout(local_size_x = 8, local_size_y = 8) in;
layout(binding = 0) uniform sampler2DArray t_above;
layout(binding = 0) writeonly uniform image2DArray i_level;
uniform ivec2 u_source_size;
uniform ivec2 u_target_size;
uniform int u_level;

float corner(ivec2 at, int layer) {
    // Along a side of 1 the corner at texel 0's centre has no second texel to weigh.
    vec2 position = vec2(at) + vec2(TAPS_X == 1 ? 0.5 : 1.0, TAPS_Y == 1 ? 0.5 : 1.0);
    return textureLod(t_above, vec3(position / vec2(u_source_size), layer), float(u_level)).r;
}

void main() {
    ivec3 target = ivec3(gl_GlobalInvocationID);
    if (any(greaterThanEqual(target.xy, u_target_size))) return;
    ivec2 at = 2 * target.xy;
    float best = corner(at, target.z);
    for (int y = 0; y <= TAPS_Y - 2 || y == 0; ++y)
        for (int x = 0; x <= TAPS_X - 2 || x == 0; ++x)
#ifdef REDUCE_MAX
            best = max(best, corner(at + ivec2(x, y), target.z));
#else
            best = min(best, corner(at + ivec2(x, y), target.z));
#endif
    imageStore(i_level, target, vec4(best));
}
