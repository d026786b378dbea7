#version 430
// One level of a Gaussian pyramid, buffer to buffer: every other sample of the level above, smoothed by the binomial.
//
// PER_WORD      elements in an output word (words.glsl); WHOLE_ROWS (place.glsl)
// SOURCE_WIDE   the level above is fp32 whatever PER_WORD says
// FETCHED       (words.glsl)
// KEEP_WIDE     also write the level as fp32, so that the next one starts from unrounded values
#include "words.glsl"
#include "place.glsl"
#include "binomial.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
#ifdef KEEP_WIDE
layout(std430, binding = 2) writeonly buffer Wide { float b_wide[]; };
#endif

uniform ivec2 u_source_size;
uniform int u_source_first;  // index in b_source of texel 0 of that plane's source; negative if bound from a later row

#if defined(FETCHED) && defined(SOURCE_WIDE)
layout(binding = 1) uniform samplerBuffer b_source;
#define LOAD(index_) FETCH_WIDE(b_source, index_)
#elif defined(FETCHED)
layout(binding = 1) uniform TEXELS_OF b_source;
#define LOAD(index_) FETCH(b_source, index_)
#else
layout(std430, binding = 1) readonly buffer Source { uint b_source[]; };
#ifdef SOURCE_WIDE
#define LOAD(index_) uintBitsToFloat(b_source[index_])
#else
#define LOAD(index_) to_float(ELEMENT(b_source, index_))
#endif
#endif

float smoothed(int origin, ivec2 at) {
    int columns[5];
    for (int x = 0; x < 5; ++x) columns[x] = mirrored(2 * at.x + x - 2, u_source_size.x);
    float sum = 0.0;
    for (int y = 0; y < 5; ++y) {
        int row = origin + mirrored(2 * at.y + y - 2, u_source_size.y) * u_source_size.x;
        float part = 0.0;
        for (int x = 0; x < 5; ++x) part += BINOMIAL[x] * LOAD(uint(row + columns[x]));
        sum += BINOMIAL[y] * part;
    }
    return sum;
}

void main() {
    Place p = place();
    if (!p.inside) return;
    int source_plane = u_source_size.x * u_source_size.y;
    float result[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        result[k] = 0.0;
        if (holds(p, k)) {
            result[k] = smoothed(u_source_first + int(p.plane) * source_plane, p.at);
#ifdef KEEP_WIDE
            b_wide[p.first + uint(k)] = result[k];
#endif
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(result));
}
