#version 430
// Bound of each box over a Hi-Z pyramid: at most four fetches, at the finest level whose canonical ancestors span at most
// two texels a side. Output [planes, 1, boxes].
// PER_WORD (words.glsl), WHOLE_ROWS (place.glsl), BUFFERED (texels.glsl; a layer is a plane), REDUCE_MAX or REDUCE_MIN.
#include "words.glsl"
#include "place.glsl"
#include "nan.glsl"
#include "texels.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
layout(std430, binding = 1) readonly buffer Boxes { vec4 b_boxes[]; };  // x0, y0, x1, y1 of every image
uniform int u_first_plane;    // plane of the chunk's first element, counted from the texture's first layer
uniform int u_first_layer;    // plane of the whole batch that the texture's first layer is
uniform int u_channels;

#if PER_WORD == 4
#define EMPTY_MAX 0.0
#define EMPTY_MIN 1.0
#define TO_STORED 255.0
#else
#define EMPTY_MAX uintBitsToFloat(0xff800000u)
#define EMPTY_MIN uintBitsToFloat(0x7f800000u)
#define TO_STORED 1.0
#endif

float bound(int layer, vec4 box) {
    ivec2 size = top_size();
    precise vec4 edges = box * vec4(size, size);
    // Clamped before the conversion, which is undefined beyond the range of an integer.
    ivec2 first = ivec2(clamp(floor(edges.xy), 0.0, 1073741824.0));
    ivec2 last = min(ivec2(clamp(ceil(edges.zw), -1.0, 1073741824.0)) - 1, size - 1);
#ifdef REDUCE_MAX
    float empty = EMPTY_MAX;
#else
    float empty = EMPTY_MIN;
#endif
    if (any(lessThan(last, first))) return empty;
    int level = 0;
    ivec2 a = first, b = last;
    while (level < last_level() && any(greaterThan(b - a, ivec2(1)))) {
        ++level;
        ivec2 top = max(size >> level, ivec2(1)) - 1;
        a = min(first >> level, top);
        b = min(last >> level, top);
    }
    Level source = level_at(layer, level);
    vec4 rows = reduce(TEXEL_AT(source, a), TEXEL_AT(source, ivec2(b.x, a.y)));
    rows = reduce(rows, TEXEL_AT(source, ivec2(a.x, b.y)));
    return reduce(rows, TEXEL_AT(source, b)).r;
}

void main() {
    Place p = place();
    if (!p.inside) return;
    float value[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        value[k] = 0.0;
        if (holds(p, k)) {
            int layer = u_first_plane + int(p.plane);
            int image = (u_first_layer + layer) / u_channels;
            value[k] = TO_STORED * bound(layer, b_boxes[image * u_target_size.x + p.at.x]);
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
