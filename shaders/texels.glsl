// Single texels of a pyramid.
// BUFFERED          it lies in a buffer, level behind level, layer behind layer; without it, in an array texture
// BFLOAT16_TEXELS   with BUFFERED: texels are the bits of bfloat16
#ifdef BUFFERED
#ifdef BFLOAT16_TEXELS
layout(binding = 0) uniform usamplerBuffer t_pyramid;
#define VALUE_OF(texel_) uintBitsToFloat((texel_) << 16)
#else
layout(binding = 0) uniform samplerBuffer t_pyramid;
#define VALUE_OF(texel_) (texel_)
#endif
uniform int u_starts[16];  // where the levels begin
uniform ivec2 u_top;       // size of level 0
uniform int u_levels;

ivec2 top_size() { return u_top; }
int last_level() { return u_levels - 1; }
#else
layout(binding = 0) uniform sampler2DArray t_pyramid;

ivec2 top_size() { return textureSize(t_pyramid, 0).xy; }
int last_level() { return textureQueryLevels(t_pyramid) - 1; }
#endif

struct Level {
    ivec2 size;
#ifdef BUFFERED
    int start;
#else
    int layer;
    int level;
#endif
};

Level level_at(int layer, int level) {
    Level l;
    l.size = max(top_size() >> level, 1);  // llvmpipe's textureSize gives the size of one lane's level to all
#ifdef BUFFERED
    l.start = u_starts[level] + layer * l.size.x * l.size.y;
#else
    l.layer = layer;
    l.level = level;
#endif
    return l;
}

#ifdef BUFFERED
#define TEXEL_AT(l_, at_) VALUE_OF(texelFetch(t_pyramid, (l_).start + (at_).y * (l_).size.x + (at_).x))
#else
#define TEXEL_AT(l_, at_) texelFetch(t_pyramid, ivec3(at_, (l_).layer), (l_).level)
#endif
