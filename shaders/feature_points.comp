#version 430
// What a pixel's features say of itself: colour, position, luma, motion, eccentricity, opponency.
//
// PER_WORD (words.glsl), CHANNELS, GROUPS, TEXELS (colour.glsl), ALIGNED, HALF, FETCHED (tile.glsl)
// MOTION   there is an earlier luma
#include "words.glsl"
#include "tile.glsl"
#include "colour.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer First { MADE b_first[]; };    // channels 0 to 4
#ifdef FETCHED
layout(binding = 2) uniform samplerBuffer b_before;   // luma of the earlier pictures
#else
layout(std430, binding = 2) readonly buffer Before { READ b_before[]; };
#endif
layout(std430, binding = 3) readonly buffer Fixations { vec2 b_fixations[]; };
layout(std430, binding = 4) writeonly buffer Second { MADE b_second[]; };  // 9 to 11
layout(std430, binding = 5) writeonly buffer Third { MADE b_third[]; };    // 38, 39

uniform ivec2 u_size;
uniform ivec2 u_rows;        // first row made, and the one after the last
uniform ivec3 u_first;       // index of texel 0 of each target, had it all rows
uniform ivec2 u_stride;      // in the targets: from channel to channel, from image to image
uniform int u_first_image;
uniform int u_before_first;  // index of texel 0 of what came before the first image
uniform int u_before_stride; // from image to image; 0 if one picture came before all of them
uniform int u_no_motion;     // images from the first of all that have no earlier one
uniform vec2 u_pixel;        // 1 / (width, height)
uniform vec2 u_box;          // (width, height) / longer side

void main() {
    int x = int(gl_GlobalInvocationID.x) * 4;
    if (x >= u_size.x) return;
    int y = u_rows.x + int(gl_GlobalInvocationID.y), image = int(gl_GlobalInvocationID.z);
    int area = u_size.x * u_size.y, at = y * u_size.x + x;
    int to = image * u_stride.y + at, next = u_stride.x;
    Colour c = colour(image * CHANNELS * area + at, u_size.x - 1 - x);
    vec4 luma = luma_of(c), motion = vec4(0.0);
#ifdef MOTION
    if (u_first_image + image >= u_no_motion) {
        motion = luma - LOAD(b_before, u_before_first + image * u_before_stride + at, x, u_size.x);
    }
#endif
    vec4 across = (vec4(x, x + 1, x + 2, x + 3) + 0.5) * u_pixel.x;
    float down = (float(y) + 0.5) * u_pixel.y;
    vec2 fixation = b_fixations[u_first_image + image];
    vec4 dx = (across - fixation.x) * u_box.x;
    float dy = (down - fixation.y) * u_box.y;
    STORE(b_first, u_first.x + to, x, u_size.x, c.r)
    STORE(b_first, u_first.x + to + next, x, u_size.x, c.g)
    STORE(b_first, u_first.x + to + 2 * next, x, u_size.x, c.b)
    STORE(b_first, u_first.x + to + 3 * next, x, u_size.x, across)
    STORE(b_first, u_first.x + to + 4 * next, x, u_size.x, vec4(down))
    STORE(b_second, u_first.y + to, x, u_size.x, luma)
    STORE(b_second, u_first.y + to + next, x, u_size.x, motion)
    STORE(b_second, u_first.y + to + 2 * next, x, u_size.x, sqrt(dx * dx + dy * dy))
    precise vec4 red_green = c.r - c.g;  // of greys too, where both are one: else NaN less NaN might be made 0
    STORE(b_third, u_first.z + to, x, u_size.x, red_green)
    STORE(b_third, u_first.z + to + next, x, u_size.x, c.b - 0.5 * (c.r + c.g))
}
