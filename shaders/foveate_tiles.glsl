// Tiles of a foveated picture, 64 x 8 pixels each, and where they are stored.
// LANES: of a tile, which is a row of a workgroup. TILES: such rows.
// PER_WORD, AT_ONCE (at_once.glsl): rows are whole vectors. CHANNELS, TO_STORED (foveate.glsl). BUFFERED (texels.glsl)
#include "words.glsl"
#include "at_once.glsl"
#include "foveate.glsl"
#include "texels.glsl"

layout(local_size_x = LANES, local_size_y = TILES) in;  // a tile a row of it: a renderer's CPU takes its time between workgroups
layout(std430, binding = 2) readonly buffer Tiles { uint b_tiles[]; };  // layer << 23 | row << 10 | column
uniform ivec4 u_first_stored;  // index in each binding of that channel of the texture's first image
uniform int u_first_tile;    // of the texture's tiles in b_tiles
uniform int u_tiles;
uniform int u_first_layer;   // that the tiles' layers count from
uniform ivec2 u_size;

#if CHANNELS == 1
#define TEXEL float
#define SWIZZLE r
#elif CHANNELS == 2
#define TEXEL vec2
#define SWIZZLE rg
#elif CHANNELS == 3
#define TEXEL vec3
#define SWIZZLE rgb
#else
#define TEXEL vec4
#define SWIZZLE rgba
#endif

// A binding a channel: an image may be more than one may hold.
layout(std430, binding = 0) writeonly buffer Target0 { STORED b_target0[]; };
#if CHANNELS > 1
layout(std430, binding = 3) writeonly buffer Target1 { STORED b_target1[]; };
#endif
#if CHANNELS > 2
layout(std430, binding = 4) writeonly buffer Target2 { STORED b_target2[]; };
#endif
#if CHANNELS > 3
layout(std430, binding = 5) writeonly buffer Target3 { STORED b_target3[]; };
#endif

// STORE_CHANNEL(binding, index of the first, c) for each channel c.
#if CHANNELS == 1
#define STORE_CHANNELS(first_) STORE_CHANNEL(b_target0, first_.r, r)
#elif CHANNELS == 2
#define STORE_CHANNELS(first_) STORE_CHANNEL(b_target0, first_.r, r) STORE_CHANNEL(b_target1, first_.g, g)
#elif CHANNELS == 3
#define STORE_CHANNELS(first_) STORE_CHANNEL(b_target0, first_.r, r) STORE_CHANNEL(b_target1, first_.g, g) \
    STORE_CHANNEL(b_target2, first_.b, b)
#else
#define STORE_CHANNELS(first_) STORE_CHANNEL(b_target0, first_.r, r) STORE_CHANNEL(b_target1, first_.g, g) \
    STORE_CHANNEL(b_target2, first_.b, b) STORE_CHANNEL(b_target3, first_.a, a)
#endif

const float INVERSE_LN2 = 1.44269504;

// Whether there is a tile for this row of the workgroup: whose image, and its first pixel.
bool find_tile(out int layer, out ivec2 at) {
    int group = int(gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x);
    int turn = group * int(gl_WorkGroupSize.y) + int(gl_LocalInvocationID.y);
    if (turn >= u_tiles) return false;
    uint tile = b_tiles[u_first_tile + turn];
    layer = u_first_layer + int(tile >> 23);
    at = ivec2(tile << 6, tile >> 7) & ivec2(0xffc0, 0xfff8);
    return true;
}

// Texels of a level about a block where the sides of all levels are halves: from the centre of the first one to the block's
// first pixel, in texels, exactly.
struct Place {
    Level source;
    ivec2 low;
    vec2 first;
    float per_pixel;
};

Place place_of(int layer, int l, ivec2 at) {
    vec2 first = (vec2(at & ((1 << l) - 1)) + 0.5) / float(1 << l) - 0.5, low = floor(first);
    return Place(level_at(layer, l), (at >> l) + ivec2(low), first - low, 1.0 / float(1 << l));
}

TEXEL texel_of(Place p, int column, int row) {
    return TEXEL_AT(p.source, clamp(p.low + ivec2(column, row), ivec2(0), p.source.size - 1)).SWIZZLE;
}

// Where a pixel of the texture's first images is stored, for each channel.
ivec4 place_in(int layer, ivec2 at, int row_vectors) {
    return u_first_stored + (layer * CHANNELS * u_size.y + at.y) * row_vectors + int(uint(at.x) / uint(AT_ONCE));
}
