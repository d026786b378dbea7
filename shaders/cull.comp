#version 430
// One level of the descent: an invocation tests the nodes of a work list. A node below its image's threshold prunes its
// subtree; any other hands its children to the next list or, at level 0, is marked in the mask. NaN is unknown: it never prunes a
// subtree, and is never kept.
// PER_WORD (words.glsl), LEVEL_ZERO: the nodes are the texels themselves.
#define REDUCE_MAX
#include "words.glsl"
#include "order.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) readonly buffer Values { uint b_values[]; };
layout(std430, binding = 1) readonly buffer Nodes { uint b_nodes[]; };
layout(std430, binding = 2) writeonly buffer Next { uint b_next[]; };
layout(std430, binding = 3) writeonly buffer Pruned { uint b_pruned[]; };
// Four words a list: its workgroups (x, y, z for the indirect dispatch) and its length; list l + 1 holds the nodes
// of level l (list 0 is not used). Then the number of pruned nodes, then a threshold key an image.
layout(std430, binding = 4) buffer Counters { uint b_counters[]; };
layout(std430, binding = 5) buffer Mask { uint b_mask[]; };

uniform int u_level;
uniform int u_levels;
uniform ivec2 u_size;        // of this level
uniform ivec2 u_below_size;  // of the level below
uniform int u_first_value;   // index in b_values of the first plane's first texel
uniform int u_first_plane;   // that plane's number in the batch
uniform int u_channels;
uniform uint u_most_groups;

uint append(int list, uint count) {
    uint at = atomicAdd(b_counters[4 * list + 3], count);
    atomicMax(b_counters[4 * list], min((at + count + uint(LOCAL_SIZE) - 1u) / uint(LOCAL_SIZE), u_most_groups));
    return at;
}

void test(uint node) {
    uint area = uint(u_size.x * u_size.y);
    uint plane = node / area;
    uint in_plane = node - plane * area;
    uint bits = ELEMENT(b_values, uint(u_first_value) + node);
#if PER_WORD != 4
    if (bits == SIGN_BIT) bits = 0u;  // -0 equals 0
#endif
    uint key = to_key(bits);
    uint threshold = b_counters[4 * (u_levels + 1) + 1 + (u_first_plane + int(plane)) / u_channels];
    bool keep = key >= threshold;
#if defined(LEVEL_ZERO) && PER_WORD != 4
    keep = keep && key != NAN_KEY;
#endif
    if (!keep) {
        uint at = atomicAdd(b_counters[4 * (u_levels + 1)], 1u);
        b_pruned[2u * at] = uint(u_level);
        b_pruned[2u * at + 1u] = node;
        return;
    }
#ifdef LEVEL_ZERO
    atomicOr(b_mask[node >> 2], 1u << ((node & 3u) * 8u));
#else
    int y = int(in_plane) / u_size.x;
    int x = int(in_plane) - y * u_size.x;
    // Canonical children: the last texel of an odd side has three.
    ivec2 first = 2 * ivec2(x, y);
    ivec2 last = ivec2(x == u_size.x - 1 ? u_below_size.x - 1 : first.x + 1, y == u_size.y - 1 ? u_below_size.y - 1 : first.y + 1);
    ivec2 count = last - first + 1;
    uint at = append(u_level, uint(count.x * count.y));
    uint below = plane * uint(u_below_size.x * u_below_size.y);
    for (int j = first.y; j <= last.y; ++j)
        for (int i = first.x; i <= last.x; ++i) b_next[at++] = below + uint(j * u_below_size.x + i);
#endif
}

void main() {
    uint count = b_counters[4 * (u_level + 1) + 3];
    uint stride = gl_NumWorkGroups.x * uint(LOCAL_SIZE);
    for (uint i = gl_GlobalInvocationID.x; i < count; i += stride) test(b_nodes[i]);
}
