// Single texels of a pyramid.
// BUFFERED          it lies in a buffer texture, level behind level, layer behind layer
// BFLOAT16_TEXELS   with BUFFERED: texels are the bits of bfloat16
// PLANAR            it lies in buffers as tensors do, channel behind channel: level 0, and all below it
// TEXELS_PER_WORD, BFLOAT16_TEXELS, CHANNELS   with PLANAR: elements of a word, 1 = fp32, 2 = fp16 or bfloat16, 4 = uint8
// ONE_CHANNEL       with PLANAR: all components of a texel are the channel that ASK_FOR asked for last
// VIEWED            with PLANAR: these are buffer textures, an element a texel; without it, storage buffers
// Without either, in an array texture.
#if defined(BUFFERED) || defined(PLANAR)
uniform int u_starts[16];  // where the levels begin
uniform ivec2 u_top;       // size of level 0
uniform int u_levels;

ivec2 top_size() { return u_top; }
int last_level() { return u_levels - 1; }
#endif

#if defined(PLANAR) && defined(VIEWED)
#if TEXELS_PER_WORD == 4 || defined(BFLOAT16_TEXELS)
layout(binding = 0) uniform usamplerBuffer t_top;
layout(binding = 1) uniform usamplerBuffer t_below;
#else
layout(binding = 0) uniform samplerBuffer t_top;
layout(binding = 1) uniform samplerBuffer t_below;
#endif
#elif defined(PLANAR)
layout(std430, binding = 6) readonly buffer Top { uint b_top[]; };
layout(std430, binding = 7) readonly buffer Below { uint b_below[]; };

#elif defined(BUFFERED)
#ifdef BFLOAT16_TEXELS
layout(binding = 0) uniform usamplerBuffer t_pyramid;
#define VALUE_OF(texel_) uintBitsToFloat((texel_) << 16)
#else
layout(binding = 0) uniform samplerBuffer t_pyramid;
#define VALUE_OF(texel_) (texel_)
#endif

#else
layout(binding = 0) uniform sampler2DArray t_pyramid;

ivec2 top_size() { return textureSize(t_pyramid, 0).xy; }
int last_level() { return textureQueryLevels(t_pyramid) - 1; }
#endif

struct Level {
    ivec2 size;
#ifdef PLANAR
    int start;
    bool top;
#elif defined(BUFFERED)
    int start;
#else
    int layer;
    int level;
#endif
};

Level level_at(int layer, int level) {
    Level l;
    l.size = max(top_size() >> level, 1);  // llvmpipe's textureSize gives the size of one lane's level to all
#ifdef PLANAR
    l.start = u_starts[level] + layer * CHANNELS * l.size.x * l.size.y;
    l.top = level == 0;
#elif defined(BUFFERED)
    l.start = u_starts[level] + layer * l.size.x * l.size.y;
#else
    l.layer = layer;
    l.level = level;
#endif
    return l;
}

// The same of a level below the first, or of the only one, which is bound as they are.
Level coarse_at(int layer, int level) {
    Level l = level_at(layer, level);
#ifdef PLANAR
    l.top = false;  // where the compiler sees it: of two buffers a software renderer reads both
#endif
    return l;
}

#if defined(PLANAR) && defined(VIEWED)
float element_of(Level l, int index) {
#if TEXELS_PER_WORD == 4
    return float(l.top ? texelFetch(t_top, index).x : texelFetch(t_below, index).x) / 255.0;  // as an array texture has them
#elif defined(BFLOAT16_TEXELS)
    return uintBitsToFloat((l.top ? texelFetch(t_top, index).x : texelFetch(t_below, index).x) << 16);
#else
    return l.top ? texelFetch(t_top, index).x : texelFetch(t_below, index).x;
#endif
}
#elif defined(PLANAR)
float element_of(Level l, int index) {
    int at = index / TEXELS_PER_WORD;
    uint word = l.top ? b_top[at] : b_below[at];
#if TEXELS_PER_WORD == 1
    return uintBitsToFloat(word);
#elif TEXELS_PER_WORD == 4
    return float((word >> (index % 4 * 8)) & 0xffu) / 255.0;  // as an array texture has them
#elif defined(BFLOAT16_TEXELS)
    return uintBitsToFloat((word >> (index % 2 * 16)) << 16);
#else
    return unpackHalf2x16(word >> (index % 2 * 16)).x;
#endif
}
#endif

#ifdef PLANAR
#ifdef ONE_CHANNEL
int asked_for = 0;
#define ASK_FOR(channel_) asked_for = channel_
#endif

vec4 texel_at(Level l, ivec2 at) {
    int index = l.start + at.y * l.size.x + at.x, plane = l.size.x * l.size.y;
#ifdef ONE_CHANNEL
    return vec4(element_of(l, index + asked_for * plane));
#else
    vec4 texel = vec4(0.0);
    for (int c = 0; c < CHANNELS; ++c) texel[c] = element_of(l, index + c * plane);
    return texel;
#endif
}
#define TEXEL_AT(l_, at_) texel_at(l_, at_)
#elif defined(BUFFERED)
#define TEXEL_AT(l_, at_) VALUE_OF(texelFetch(t_pyramid, (l_).start + (at_).y * (l_).size.x + (at_).x))
#else
#define TEXEL_AT(l_, at_) texelFetch(t_pyramid, ivec3(at_, (l_).layer), (l_).level)
#endif
#ifndef ASK_FOR
#define ASK_FOR(channel_)
#endif
