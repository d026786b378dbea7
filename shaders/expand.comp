#version 430
// A level of a pyramid plus, or minus, the next coarser one brought to its size.
//
// PER_WORD      elements in an output word (words.glsl); WHOLE_ROWS (place.glsl)
// FETCHED       (words.glsl)
// FINE_WIDE, COARSE_WIDE   that source is fp32 whatever PER_WORD says
// SIGN          1.0 to rebuild (collapse), -1.0 to take away (Laplacian)
#include "words.glsl"
#include "place.glsl"
#include "expansion.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };

uniform ivec2 u_coarse_size;
uniform int u_fine_first;    // index in b_fine of the chunk's first element
uniform int u_coarse_first;  // index in b_coarse of texel 0 of that plane; negative if bound from a later row

#if defined(FETCHED) && defined(FINE_WIDE)
layout(binding = 1) uniform samplerBuffer b_fine;
#define LOAD_FINE(index_) FETCH_WIDE(b_fine, index_)
#elif defined(FETCHED)
layout(binding = 1) uniform TEXELS_OF b_fine;
#define LOAD_FINE(index_) FETCH(b_fine, index_)
#else
layout(std430, binding = 1) readonly buffer Fine { uint b_fine[]; };
#ifdef FINE_WIDE
#define LOAD_FINE(index_) uintBitsToFloat(b_fine[index_])
#else
#define LOAD_FINE(index_) to_float(ELEMENT(b_fine, index_))
#endif
#endif
#if defined(FETCHED) && defined(COARSE_WIDE)
layout(binding = 2) uniform samplerBuffer b_coarse;
#define LOAD_COARSE(index_) FETCH_WIDE(b_coarse, index_)
#elif defined(FETCHED)
layout(binding = 2) uniform TEXELS_OF b_coarse;
#define LOAD_COARSE(index_) FETCH(b_coarse, index_)
#else
layout(std430, binding = 2) readonly buffer Coarse { uint b_coarse[]; };
#ifdef COARSE_WIDE
#define LOAD_COARSE(index_) uintBitsToFloat(b_coarse[index_])
#else
#define LOAD_COARSE(index_) to_float(ELEMENT(b_coarse, index_))
#endif
#endif

float expanded(int origin, ivec2 at) {
    ivec3 columns = taps(at.x, u_coarse_size.x), rows = taps(at.y, u_coarse_size.y);
    vec3 wx = weights(at.x), wy = weights(at.y);
    float sum = 0.0;
    for (int y = 0; y < 3; ++y) {
        int row = origin + rows[y] * u_coarse_size.x;
        float part = 0.0;
        for (int x = 0; x < 3; ++x) part += wx[x] * LOAD_COARSE(uint(row + columns[x]));
        sum += wy[y] * part;
    }
    return sum;
}

void main() {
    Place p = place();
    if (!p.inside) return;
    int coarse_plane = u_coarse_size.x * u_coarse_size.y;
    float result[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        result[k] = 0.0;
        if (holds(p, k)) {
            float fine = LOAD_FINE(uint(u_fine_first + int(p.first) + k));
            result[k] = fine + SIGN * expanded(u_coarse_first + int(p.plane) * coarse_plane, p.at);
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(result));
}
