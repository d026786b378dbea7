// Trilinear samples of t_pyramid, which includers declare first.
// FETCHED   filtered here in fp32, from single texels: software renderers filter 8-bit textures with weights of 8 bits, off
//           by more than a count. It is faster than their filter on 16-bit ones, too.
#ifdef FETCHED
vec4 bilinear(vec3 at, int level) {
    ivec2 size = max(textureSize(t_pyramid, 0).xy >> level, 1);  // llvmpipe gives the size of one lane's level to all
    vec2 place = clamp(at.xy * vec2(size) - 0.5, vec2(-1.0), vec2(size));  // far positions are no integers
    vec2 whole = floor(place), share = place - whole;
    ivec2 first = clamp(ivec2(whole), ivec2(0), size - 1), second = clamp(ivec2(whole) + 1, ivec2(0), size - 1);
    int layer = int(at.z);
    vec4 upper = mix(texelFetch(t_pyramid, ivec3(first, layer), level),
                     texelFetch(t_pyramid, ivec3(second.x, first.y, layer), level), share.x);
    vec4 lower = mix(texelFetch(t_pyramid, ivec3(first.x, second.y, layer), level),
                     texelFetch(t_pyramid, ivec3(second, layer), level), share.x);
    return mix(upper, lower, share.y);
}

vec4 trilinear(vec3 at, float level) {
    level = min(level, float(textureQueryLevels(t_pyramid) - 1));
    int fine = int(level);
    vec4 texel = bilinear(at, fine);
    float share = level - float(fine);
    return share > 0.0 ? mix(texel, bilinear(at, fine + 1), share) : texel;
}
#else
#define trilinear(at_, level_) textureLod(t_pyramid, at_, level_)
#endif
