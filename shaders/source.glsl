// What a reduction starts from: planes of a tensor of any strides, or layers of a texture. Needs footprint.glsl.
//
// SOURCE_PER_WORD  elements of the source in a word: 1 = fp32, 2 = fp16, or bfloat16 with SOURCE_BFLOAT16, 4 = uint8
// CONVERT          with REDUCE_MEAN: values times a scale plus an offset
// EVEN             its sides are even (or 1 where the level below keeps it: then not EVEN)
// PAIRED           elements 2i and 2i + 1 of a row lie in one word
// FROM_TEXTURE     with REDUCE_MEAN: a layer is a plane; where sides are even one bilinear fetch averages four texels
uniform ivec2 u_source_size;
uniform int u_channels;

uniform int u_first_plane;  // of the batch, that this dispatch starts with

int local_plane() { return int(gl_WorkGroupID.z); }
int plane() { return u_first_plane + local_plane(); }

#ifdef FROM_TEXTURE
uniform sampler2DArray t_source;
uniform int u_first_layer;
uniform float u_texel_scale;

VALUE source_quad(ivec2 at) {
    vec2 between = vec2(2 * at + 1) / vec2(u_source_size);
    return textureLod(t_source, vec3(between, float(u_first_layer + local_plane())), 0.0).x * u_texel_scale;
}
VALUE source_texel(ivec2 at) { return texelFetch(t_source, ivec3(at, u_first_layer + local_plane()), 0).x * u_texel_scale; }

#else
layout(std430, binding = 0) readonly buffer Source { uint b_source[]; };
uniform int u_source_first;  // element of b_source that is texel 0 of plane 0; negative if bound from a later one
uniform ivec4 u_stride;      // elements to the next texel along x, y, channel and image

int source_index(ivec2 at) {
    ivec4 place = ivec4(at, plane() % u_channels, plane() / u_channels) * u_stride;
    return u_source_first + place.x + place.y + place.z + place.w;
}

#ifdef CONVERT
uniform vec4 u_scale;
uniform vec4 u_offset;
#endif

VALUE source_value(uint bits) {
#ifndef REDUCE_MEAN
    return to_key(bits);
#else
#if SOURCE_PER_WORD == 1
    float value = uintBitsToFloat(bits);
#elif defined(SOURCE_BFLOAT16)
    float value = uintBitsToFloat(bits << 16);
#elif SOURCE_PER_WORD == 2
    float value = unpackHalf2x16(bits).x;
#else
    float value = float(bits);
#endif
#ifdef CONVERT
    value = value * u_scale[plane() % u_channels] + u_offset[plane() % u_channels];
#endif
    return value;
#endif
}

#define SOURCE_BITS (32 / SOURCE_PER_WORD)
#if SOURCE_PER_WORD == 1
#define SOURCE_MASK 0xffffffffu
#else
#define SOURCE_MASK ((1u << SOURCE_BITS) - 1u)
#endif

VALUE source_element(int index) {
    uint word = b_source[index / SOURCE_PER_WORD];
    return source_value((word >> (index % SOURCE_PER_WORD * SOURCE_BITS % 32)) & SOURCE_MASK);
}

VALUE source_texel(ivec2 at) { return source_element(source_index(at)); }

#if defined(PAIRED) && SOURCE_PER_WORD > 1
void source_pair(int index, out VALUE a, out VALUE b) {
    uint bits = b_source[index / SOURCE_PER_WORD] >> (index % SOURCE_PER_WORD * SOURCE_BITS);
    a = source_value(bits & SOURCE_MASK);
    b = source_value((bits >> SOURCE_BITS) & SOURCE_MASK);
}
#else
void source_pair(int index, out VALUE a, out VALUE b) {
    a = source_element(index);
    b = source_element(index + u_stride.x);
}
#endif

VALUE source_quad(ivec2 at) {
    int index = source_index(2 * at);
    VALUE a, b, c, d;
    source_pair(index, a, b);
    source_pair(index + u_stride.y, c, d);
    return quad(a, b, c, d);
}
#endif

// Texel `at` of level 1, which has this size.
VALUE of_source(ivec2 at, ivec2 size) {
#ifdef EVEN
    return source_quad(at);
#else
    ivec2 taps = taps_of(u_source_size);
    VALUE v[9];
    for (int k = 0; k < 9; ++k) {
        v[k] = NOTHING;
        ivec2 tap = ivec2(k % 3, k / 3);
        if (tap.x < taps.x && tap.y < taps.y) v[k] = source_texel(2 * at + tap);
    }
    return box(v, at, size, taps);
#endif
}
