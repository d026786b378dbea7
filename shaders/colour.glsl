// Four neighbours of an image, in [0, 1]; grey serves as all three colours, alpha is left out.
// Needs words.glsl, pairs.glsl, loads.glsl and CHANNELS.
// GROUPS    rows are whole groups of four, and begin at one in their buffers: loads are of groups
// TEXELS    fp32 colours are buffer textures
#ifndef GROUPS
#define GROUP uint
#elif PER_WORD == 1
#define GROUP FOUR_FLOATS
#define VALUES_IN(group) four_of(group)
#elif PER_WORD == 2
#define GROUP TWO_WORDS
vec2 halves_in(uint word) { return vec2(to_float(word & 0xffffu), to_float(word >> 16)); }
vec4 halves_in(uvec2 words) { return vec4(halves_in(words.x), halves_in(words.y)); }
#define VALUES_IN(group) halves_in(words_of(group))
#else
#define GROUP uint
#define VALUES_IN(group) vec4((uvec4(group) >> uvec4(0, 8, 16, 24)) & 0xffu)
#endif
#ifdef TEXELS
layout(binding = 1) uniform samplerBuffer b_red;
#if CHANNELS > 2
layout(binding = 6) uniform samplerBuffer b_green;
layout(binding = 7) uniform samplerBuffer b_blue;
#endif
#else
layout(std430, binding = 1) readonly buffer Red { GROUP b_red[]; };
#if CHANNELS > 2
layout(std430, binding = 6) readonly buffer Green { GROUP b_green[]; };
layout(std430, binding = 7) readonly buffer Blue { GROUP b_blue[]; };
#endif
#endif

uniform ivec3 u_source_first;  // index of texel 0 of the first image in each; negative if bound from a later row

#if PER_WORD == 4
#define TO_UNIT (1.0 / 255.0)
#else
#define TO_UNIT 1.0
#endif
// `last`: how far the row's last texel is.
#if defined(TEXELS) && defined(GROUPS)
#define FOUR(buffer_, at, last) texelFetch(buffer_, (at) >> 2)
#elif defined(TEXELS)
#define FOUR(buffer_, at, last) vec4(texelFetch(buffer_, at).x, texelFetch(buffer_, (at) + min(1, last)).x, \
    texelFetch(buffer_, (at) + min(2, last)).x, texelFetch(buffer_, (at) + min(3, last)).x)
#elif defined(GROUPS)
#define FOUR(buffer_, at, last) (TO_UNIT * VALUES_IN(buffer_[(at) >> 2]))
#else
#define FOUR(buffer_, at, last) (TO_UNIT * vec4( \
    to_float(ELEMENT(buffer_, uint(at))), to_float(ELEMENT(buffer_, uint((at) + min(1, last)))), \
    to_float(ELEMENT(buffer_, uint((at) + min(2, last)))), to_float(ELEMENT(buffer_, uint((at) + min(3, last))))))
#endif

struct Colour { vec4 r, g, b; };

Colour colour(int at, int last) {
    vec4 r = FOUR(b_red, u_source_first.x + at, last);
#if CHANNELS > 2
    return Colour(r, FOUR(b_green, u_source_first.y + at, last), FOUR(b_blue, u_source_first.z + at, last));
#else
    return Colour(r, r, r);
#endif
}

vec4 luma_of(Colour c) {
#if CHANNELS > 2
    return 0.299 * c.r + 0.587 * c.g + 0.114 * c.b;
#else
    return c.r;
#endif
}
