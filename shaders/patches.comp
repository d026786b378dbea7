#version 430
// Patches of whole words: an invocation makes the same words of every channel of a patch, so that one fetch serves them all.
// The words of ROWS rows, which begin and end with one, belong to LANES invocations, for several patches in a workgroup.
//
// PER_WORD (words.glsl), CHANNELS, PATCH, BORDER_ZERO (patches.glsl)
// ROWS            1 or 2
// PATCHES         in a workgroup of INVOCATIONS = LANES * PATCHES
// STEPS_AT_ONCE   times ROWS rows that an invocation makes one below the other: what the patch has in common is worked out
//                 once for all of them
#include "words.glsl"
#include "patches.glsl"

const int LANES = ROWS * PATCH / PER_WORD;
const int STEPS = PATCH / ROWS;
const int WORDS = PATCH * PATCH / PER_WORD;  // of a plane

layout(local_size_x = INVOCATIONS) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
uniform int u_first_word;   // index in b_target of the chunk's first word
uniform int u_first_patch;  // of the chunk, counted from the first of the texture's first image
uniform int u_patches;      // of the chunk
uniform int u_budget;       // patches an image
uniform int u_first_site;   // of the texture's first image
uniform int u_steps;        // STEPS; a loop to a number that the compiler knows is unrolled

#if PER_WORD == 1
#define GATHER(c) texel[0].c
#elif PER_WORD == 2
#define GATHER(c) vec2(texel[0].c, texel[1].c)
#else
#define GATHER(c) vec4(texel[0].c, texel[1].c, texel[2].c, texel[3].c)
#endif

void write(int target, vec4 texel[PER_WORD]) {
    b_target[target] = pack(GATHER(r));
#if CHANNELS > 1
    b_target[target + WORDS] = pack(GATHER(g));
#endif
#if CHANNELS > 2
    b_target[target + 2 * WORDS] = pack(GATHER(b));
#endif
#if CHANNELS > 3
    b_target[target + 3 * WORDS] = pack(GATHER(a));
#endif
}

void main() {
    int lane = int(gl_LocalInvocationID.x) % LANES;
    int local = int(gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * PATCHES + int(gl_LocalInvocationID.x) / LANES;
    if (local >= u_patches) return;
    int index = u_first_patch + local;
    int layer = index / u_budget;
    Patch p = patch_at(u_first_site + index);
    ivec2 at[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        int sample_ = lane * PER_WORD + k;
        at[k] = ivec2(sample_ % PATCH, sample_ / PATCH);
    }
    int begin = int(gl_WorkGroupID.y) * STEPS_AT_ONCE, end = min(begin + STEPS_AT_ONCE, u_steps);
    int target = u_first_word + local * CHANNELS * WORDS + lane;
    vec4 texel[PER_WORD];
    // The choice is outside the loop: a software renderer walks both sides of a branch, but no loop that no lane needs.
    if (p.exact) {
        for (int step_ = begin; step_ < end; ++step_) {
            for (int k = 0; k < PER_WORD; ++k) texel[k] = on_texel(p, layer, at[k] + ivec2(0, step_ * ROWS));
            write(target + step_ * LANES, texel);
        }
    } else {
        for (int step_ = begin; step_ < end; ++step_) {
            for (int k = 0; k < PER_WORD; ++k) texel[k] = between_texels(p, layer, at[k] + ivec2(0, step_ * ROWS));
            write(target + step_ * LANES, texel);
        }
    }
}
