#version 430
// inverse_log_polar.comp where rows are whole words: an invocation makes four neighbours of a row in all planes of an image,
// which share the logarithm, the angle and the places of what they read.
//
// PER_WORD, FETCHED (words.glsl), AT_ONCE (at_once.glsl), CORTICAL, BORDER_ZERO (inverse_log_polar.comp)
#include "words.glsl"
#include "at_once.glsl"
#define REALS vec4
#define INTS ivec4
#include "polar.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { STORED b_target[]; };
#ifdef FETCHED
layout(binding = 1) uniform TEXELS_OF b_source;
#define LOAD(index_) FETCH(b_source, index_)
#else
layout(std430, binding = 1) readonly buffer Source { uint b_source[]; };
#define LOAD(index_) to_float(ELEMENT(b_source, uint(index_)))
#endif
layout(std430, binding = 2) readonly buffer Fixations { vec2 b_fixations[]; };

uniform ivec2 u_size;
uniform ivec2 u_map_size;  // (wedges, rings)
uniform ivec2 u_first;     // index of the first plane's texel 0: source, target, the latter in vectors
uniform int u_planes;      // of an image
uniform int u_first_image;
uniform vec2 u_pixel;      // 1 / (width, height)
uniform vec2 u_box;        // (width, height) / longer side
uniform vec3 u_radii;      // where the rings begin (log) or e0 (cortical), where they end, rings / their ln ratio

vec4 four(int origin, ivec4 at) {
    return vec4(LOAD(origin + at.x), LOAD(origin + at.y), LOAD(origin + at.z), LOAD(origin + at.w));
}

void main() {
    ivec2 at = ivec2(4 * int(gl_GlobalInvocationID.x), int(gl_GlobalInvocationID.y));
    if (at.x >= u_size.x) return;
    int image = int(gl_GlobalInvocationID.z);
    vec2 fixation = b_fixations[u_first_image + image];
    vec4 right = ((vec4(0.5, 1.5, 2.5, 3.5) + float(at.x)) * u_pixel.x - fixation.x) * u_box.x;
    float down = ((float(at.y) + 0.5) * u_pixel.y - fixation.y) * u_box.y;
    vec4 r = sqrt(right * right + down * down);
#ifdef CORTICAL
    vec4 ring = exact_log(1.0 + r / u_radii.x) * u_radii.z - 0.5;
#else
    vec4 ring = exact_log(max(r, 1e-30) / u_radii.x) * u_radii.z - 0.5;
#endif
    ring = clamp(ring, 0.0, float(u_map_size.y - 1));
    vec4 wedge = turns(vec4(down), right) * float(u_map_size.x) - 0.5;
    vec4 ring_below = floor(ring), wedge_below = floor(wedge);
    vec4 across = ring - ring_below, along = wedge - wedge_below;
    ivec4 inner = ivec4(ring_below), outer = min(inner + 1, u_map_size.y - 1) * u_map_size.x;
    inner *= u_map_size.x;
    ivec4 before = ivec4(wedge_below), after = before + 1;  // below the first one is the last
    before += ivec4(lessThan(before, ivec4(0))) * u_map_size.x;
    after += ivec4(lessThan(after, ivec4(0))) * u_map_size.x;
    after -= ivec4(equal(after, ivec4(u_map_size.x))) * u_map_size.x;
    ivec4 inner_before = inner + before, inner_after = inner + after;
    ivec4 outer_before = outer + before, outer_after = outer + after;

    int map_area = u_map_size.x * u_map_size.y, row_vectors = int(uint(u_size.x) / uint(AT_ONCE));
    int origin = u_first.x + image * u_planes * map_area;
    int target = u_first.y + (image * u_planes * u_size.y + at.y) * row_vectors + int(uint(at.x) / uint(AT_ONCE));
    for (int plane = 0; plane < u_planes; ++plane) {
        vec4 a = four(origin, inner_before), b = four(origin, outer_before);
        a += (four(origin, inner_after) - a) * along;
        b += (four(origin, outer_after) - b) * along;
        vec4 values = a + (b - a) * across;
#ifdef BORDER_ZERO
        values = mix(values, vec4(0.0), greaterThan(r, vec4(u_radii.y)));
#endif
        float texel[4] = float[4](values.x, values.y, values.z, values.w);
        for (int k = 0; k < 4; k += AT_ONCE) {
            if (at.x + k < u_size.x) b_target[target + k / AT_ONCE] = PACKED(texel, k, x);
        }
        origin += map_area;
        target += row_vectors * u_size.y;
    }
}
