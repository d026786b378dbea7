#version 430
// Patches of whole vectors: an invocation makes the same vectors of every channel of a patch, so that one fetch serves them
// all. The vectors of ROWS rows, which begin and end with one, belong to LANES invocations, for several patches in a
// workgroup.
//
// PER_WORD, AT_ONCE (at_once.glsl), CHANNELS, PATCH, BORDER_ZERO (patches.glsl)
// ROWS            1 or 2
// PATCHES         in a workgroup of INVOCATIONS = LANES * PATCHES
// STEPS_AT_ONCE   times ROWS rows that an invocation makes one below the other: what the patch has in common is worked out
//                 once for all of them
// TOUCH           lines of the cache are asked for before their texels are filtered
#include "words.glsl"
#include "at_once.glsl"
#include "patches.glsl"

const int LANES = ROWS * PATCH / AT_ONCE;
const int STEPS = PATCH / ROWS;
const int VECTORS = PATCH * PATCH / AT_ONCE;  // of a plane

layout(local_size_x = INVOCATIONS) in;
layout(std430, binding = 0) writeonly buffer Target { STORED b_target[]; };
uniform int u_first_stored;  // index in b_target of the chunk's first element
uniform int u_first_patch;   // of the chunk, counted from the first of the texture's first image
uniform int u_patches;       // of the chunk
uniform int u_budget;        // patches an image
uniform int u_first_site;    // of the texture's first image
uniform int u_steps;         // STEPS; a loop to a number that the compiler knows is unrolled
uniform uint u_nothing;      // 0, which the compiler does not know either

void write(int target, vec4 texel[AT_ONCE]) {
    b_target[target] = PACKED(texel, 0, r);
#if CHANNELS > 1
    b_target[target + VECTORS] = PACKED(texel, 0, g);
#endif
#if CHANNELS > 2
    b_target[target + 2 * VECTORS] = PACKED(texel, 0, b);
#endif
#if CHANNELS > 3
    b_target[target + 3 * VECTORS] = PACKED(texel, 0, a);
#endif
}

#ifdef TOUCH
const int TEXELS_A_LINE = 4;

// Reads of a texel in each line that the patch rests on, one right after the other: a CPU waits for a dozen lines together,
// and filtering has it ask for a few at a time. Returns 0, which rests on all of them.
uint touch(Along a, int lane) {
    Level level = a.level;
    ivec2 end = level.size - 1;
    ivec2 first = clamp(a.texel + ivec2(floor(place_of(a, ivec2(0)))), ivec2(0), end);
    ivec2 last = clamp(a.texel + ivec2(floor(place_of(a, ivec2(PATCH - 1)))) + 1, ivec2(0), end);
    uint bits = 0u;
    for (int x = min(first.x + lane * TEXELS_A_LINE, last.x); x <= last.x; x += LANES * TEXELS_A_LINE) {
        for (int y = first.y; y <= last.y; y += 4) {
            for (int k = 0; k < 4; ++k) bits |= floatBitsToUint(TEXEL_AT(level, ivec2(x, min(y + k, last.y))).r);
        }
    }
    return bits & u_nothing;
}
#endif

void main() {
    int lane = int(gl_LocalInvocationID.x) % LANES;
    int local = int(gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * PATCHES + int(gl_LocalInvocationID.x) / LANES;
    int step_ = int(gl_WorkGroupID.y) * STEPS_AT_ONCE, end = min(step_ + STEPS_AT_ONCE, u_steps);
    if (local >= u_patches || step_ >= end) return;
    int index = u_first_patch + local;
    int layer = index / u_budget;
    Patch p = patch_at(u_first_site + index, layer);
    ivec2 at[AT_ONCE];
    for (int k = 0; k < AT_ONCE; ++k) {
        int sample_ = lane * AT_ONCE + k;
        at[k] = ivec2(sample_ % PATCH, sample_ / PATCH);
    }
    int target = u_first_stored + local * CHANNELS * VECTORS + lane;
    vec4 texel[AT_ONCE];
    // The choice is outside the loops, and they ask at their ends: a software renderer walks both sides of a branch, and
    // through the rest of a loop that every lane has left.
    if (p.exact) {
        do {
            for (int k = 0; k < AT_ONCE; ++k) texel[k] = on_texel(p, at[k] + ivec2(0, step_ * ROWS));
            write(target + step_ * LANES, texel);
        } while (++step_ < end);
    } else {
#ifdef TOUCH
        target += int(touch(p.fine, lane));
        if (p.share > 0.0) target += int(touch(p.coarse, lane));
#endif
        do {
#if defined(FETCHED) && !defined(SHARPER) && PATCH % 2 == 0 && AT_ONCE % 2 == 0
            for (int k = 0; k < AT_ONCE; k += 2) between_texels(p, at[k] + ivec2(0, step_ * ROWS), texel[k], texel[k + 1]);
#else
            for (int k = 0; k < AT_ONCE; ++k) texel[k] = between_texels(p, at[k] + ivec2(0, step_ * ROWS));
#endif
            write(target + step_ * LANES, texel);
        } while (++step_ < end);
    }
}
