#version 430
// One level of the descent: an invocation tests the children of a node that survived, or a node of the coarsest level. A
// node below its image's threshold prunes its subtree; any other is kept: at level 0 that is the answer, above it the node
// joins the list of those whose children come next. NaN is unknown: it never prunes a subtree, and is never kept at level 0.
// PER_WORD (words.glsl), ROOTS: the coarsest level, LEVEL_ZERO: the nodes are the texels themselves.
#define REDUCE_MAX
#include "words.glsl"
#include "order.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) readonly buffer Values { uint b_values[]; };
layout(std430, binding = 1) readonly buffer Parents { uint b_parents[]; };
layout(std430, binding = 2) writeonly buffer Survivors { uint b_survivors[]; };
// A byte a node: 0 was never looked at.
layout(std430, binding = 3) buffer States { uint b_states[]; };
// Four words a level: workgroups (x, y, z) for the children of its survivors, and how many survivors there are. Then a
// threshold key an image.
layout(std430, binding = 4) buffer Counters { uint b_counters[]; };

const uint KEPT = 1u, PRUNED = 2u;
const uint NOWHERE = 0xffffffffu;

uniform int u_level;
uniform int u_levels;
uniform ivec2 u_size;        // of this level
uniform ivec2 u_above_size;  // of the parents' level
uniform int u_first_value;   // index in b_values of the first plane's first texel
uniform int u_first_plane;   // that plane's number in the batch
uniform int u_channels;
uniform uint u_roots;
uniform uint u_most_groups;

bool reaches(uint node, uint threshold) {
    uint bits = ELEMENT(b_values, uint(u_first_value) + node);
#if PER_WORD != 4
    if (bits == SIGN_BIT) bits = 0u;  // -0 equals 0
#endif
    uint key = to_key(bits);
#if defined(LEVEL_ZERO) && PER_WORD != 4
    return key >= threshold && key != NAN_KEY;
#else
    return key >= threshold;
#endif
}

uint append(uint count) {
    uint at = atomicAdd(b_counters[4 * u_level + 3], count);
    atomicMax(b_counters[4 * u_level], min((at + count + uint(LOCAL_SIZE) - 1u) / uint(LOCAL_SIZE), u_most_groups));
    return at;
}

// Nodes first .. last of a plane: at most 3 x 3.
void test(uint plane, ivec2 first, ivec2 last) {
    uint threshold = b_counters[4 * u_levels + (u_first_plane + int(plane)) / u_channels];
    uint origin = plane * uint(u_size.x * u_size.y);
    uint kept = 0u, bit = 1u;
    // Neighbours share a word, and words are shared with other invocations.
    uint word = NOWHERE, states = 0u;
    for (int y = first.y; y <= last.y; ++y)
        for (int x = first.x; x <= last.x; ++x) {
            uint node = origin + uint(y * u_size.x + x);
            bool keep = reaches(node, threshold);
            if (keep) kept |= bit;
            bit <<= 1;
            if (node >> 2 != word) {
                if (word != NOWHERE) atomicOr(b_states[word], states);
                word = node >> 2;
                states = 0u;
            }
            states |= (keep ? KEPT : PRUNED) << ((node & 3u) * 8u);
        }
    atomicOr(b_states[word], states);
#ifndef LEVEL_ZERO
    if (kept == 0u) return;
    uint at = append(uint(bitCount(kept)));
    bit = 1u;
    for (int y = first.y; y <= last.y; ++y)
        for (int x = first.x; x <= last.x; ++x) {
            if ((kept & bit) != 0u) b_survivors[at++] = origin + uint(y * u_size.x + x);
            bit <<= 1;
        }
#endif
}

void main() {
    uint stride = gl_NumWorkGroups.x * uint(LOCAL_SIZE);
#ifdef ROOTS
    ivec2 size = u_size;
    uint count = u_roots;
#else
    ivec2 size = u_above_size;
    uint count = b_counters[4 * (u_level + 1) + 3];
#endif
    uint area = uint(size.x * size.y);
    for (uint i = gl_GlobalInvocationID.x; i < count; i += stride) {
#ifdef ROOTS
        uint node = i;
#else
        uint node = b_parents[i];
#endif
        uint plane = node / area;
        int in_plane = int(node - plane * area);
        ivec2 at = ivec2(in_plane % size.x, in_plane / size.x);
#ifdef ROOTS
        test(plane, at, at);
#else
        // Canonical children: the last texel of an odd side has three.
        ivec2 first = 2 * at;
        test(plane, first, ivec2(at.x == size.x - 1 ? u_size.x - 1 : first.x + 1, at.y == size.y - 1 ? u_size.y - 1 : first.y + 1));
#endif
    }
}
