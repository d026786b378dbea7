#version 430
// One level of a mip chain, buffer to buffer: each invocation reduces the footprints of one word of output.
//
// PER_WORD      elements in an output word (words.glsl); WHOLE_ROWS (place.glsl)
// SOURCE_WIDE   the level above is fp32 whatever PER_WORD says
// FETCHED       (words.glsl); of max and min it is texels of bits
// KEEP_WIDE     also write the level as fp32, so that the next one starts from unrounded values
// REDUCE_MEAN, REDUCE_MAX or REDUCE_MIN
// TAPS_X, TAPS_Y  width of the footprint: 2 for even sides, 3 for odd ones, 1 where the side is 1 already
#include "words.glsl"
#include "place.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
#ifdef KEEP_WIDE
layout(std430, binding = 2) writeonly buffer Wide { float b_wide[]; };
#endif

uniform ivec2 u_source_size;
uniform int u_source_first;  // index in b_source of texel 0 of that plane's source; negative if bound from a later row

#if !defined(FETCHED)
layout(std430, binding = 1) readonly buffer Source { uint b_source[]; };
#elif !defined(REDUCE_MEAN)
layout(binding = 1) uniform usamplerBuffer b_source;
#elif defined(SOURCE_WIDE)
layout(binding = 1) uniform samplerBuffer b_source;
#else
layout(binding = 1) uniform TEXELS_OF b_source;
#endif

#ifdef REDUCE_MEAN
#include "polyphase.glsl"
#define VALUE float
#if defined(FETCHED) && defined(SOURCE_WIDE)
#define LOAD(index_) FETCH_WIDE(b_source, index_)
#elif defined(FETCHED)
#define LOAD(index_) FETCH(b_source, index_)
#elif defined(SOURCE_WIDE)
#define LOAD(index_) uintBitsToFloat(b_source[index_])
#else
#define LOAD(index_) to_float(ELEMENT(b_source, index_))
#endif

VALUE footprint(int origin, ivec2 at) {
    vec3 wx = weights(at.x, u_target_size.x, TAPS_X);
    vec3 wy = weights(at.y, u_target_size.y, TAPS_Y);
    float sum = 0.0;
    for (int y = 0; y < TAPS_Y; ++y) {
        float row = 0.0;
        for (int x = 0; x < TAPS_X; ++x) row += wx[x] * LOAD(uint(origin + y * u_source_size.x + x));
        sum += wy[y] * row;
    }
    return sum;
}
#else
#include "order.glsl"
#define VALUE uint
#ifdef FETCHED
#define LOAD(index_) texelFetch(b_source, int(index_)).x
#else
#define LOAD(index_) ELEMENT(b_source, index_)
#endif
VALUE footprint(int origin, ivec2 at) {
    uint best = IDENTITY_KEY;
    for (int y = 0; y < TAPS_Y; ++y)
        for (int x = 0; x < TAPS_X; ++x)
            best = REDUCE(best, to_key(LOAD(uint(origin + y * u_source_size.x + x))));
    return from_key(best);
}
#endif

void main() {
    Place p = place();
    if (!p.inside) return;
    int source_plane = u_source_size.x * u_source_size.y;
    VALUE result[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        result[k] = VALUE(0);
        if (holds(p, k)) {
            int origin = u_source_first + int(p.plane) * source_plane + 2 * p.at.y * u_source_size.x + 2 * p.at.x;
            result[k] = footprint(origin, p.at);
#ifdef KEEP_WIDE
            b_wide[p.first + uint(k)] = result[k];
#endif
        }
        advance(p);
    }
#ifdef REDUCE_MEAN
    b_target[p.word] = pack(VALUES_OF(result));
#else
    uint bits = 0u;
    for (int k = 0; k < PER_WORD; ++k) bits |= result[k] << (uint(k) * (32u / uint(PER_WORD)) % 32u);
    b_target[p.word] = bits;
#endif
}
