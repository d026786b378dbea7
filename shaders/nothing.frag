#version 430
// The same for what is drawn. The colour is one of the eight.
layout(std430, binding = 0) readonly buffer Sources { uint b_source[]; } b_storage[STORAGE_BINDINGS - 1];
layout(binding = 0) uniform usamplerBuffer b_sources[TEXTURE_UNITS];
out vec4 f_texel;

void main() {
    uint read = 0u;
    for (int i = 0; i < TEXTURE_UNITS; ++i) read |= texelFetch(b_sources[i], 0).x;
    for (int i = 0; i < STORAGE_BINDINGS - 1; ++i) read |= b_storage[i].b_source[0];
    f_texel = vec4(float(read));
}
