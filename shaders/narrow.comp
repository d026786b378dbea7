#version 430
// fp32 values rounded to fp16 or bfloat16, to any run of elements. What else the first and the last word hold stays.
// BFLOAT16 (halves.glsl)
#include "halves.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) buffer Target { uint b_target[]; };
layout(std430, binding = 1) readonly buffer Source { float b_source[]; };

uniform int u_source_first;   // index in b_source of the first value
uniform uint u_target_first;  // the element of b_target that it becomes
uniform int u_elements;

void main() {
    uint word = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * uint(LOCAL_SIZE) + gl_LocalInvocationIndex;
    int low = 2 * int(word) - int(u_target_first & 1u), high = low + 1;  // values of the word's halves
    if (low >= u_elements) return;
    uint at = (u_target_first >> 1) + word;
    bool whole = low >= 0 && high < u_elements;
    uint bits = whole ? 0u : b_target[at];
    if (low >= 0) bits = (bits & 0xffff0000u) | half_bits(b_source[u_source_first + low]);
    if (high < u_elements) bits = (bits & 0xffffu) | (half_bits(b_source[u_source_first + high]) << 16);
    b_target[at] = bits;
}
