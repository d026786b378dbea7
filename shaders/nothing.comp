#version 430
// A dispatch that is bound to next to nothing, wherever shaders bind buffers and textures; or IMAGE, images, by itself:
// OpenGL promises eight buffers and images together.
layout(local_size_x = 1) in;
#if IMAGE
layout(binding = 0) writeonly uniform image2DArray i_target;

void main() { imageStore(i_target, ivec3(0), vec4(0.0)); }
#else
layout(std430, binding = 0) writeonly buffer Targets { uint b_target[]; } b_targets[STORAGE_BINDINGS];
layout(binding = 0) uniform usamplerBuffer b_sources[TEXTURE_UNITS];

void main() {
    uint read = 0u;
    for (int i = 0; i < TEXTURE_UNITS; ++i) read |= texelFetch(b_sources[i], 0).x;
    for (int i = 0; i < STORAGE_BINDINGS; ++i) b_targets[i].b_target[0] = read;
}
#endif
