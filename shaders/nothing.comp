#version 430
// A dispatch that is bound to next to nothing, wherever shaders bind buffers.
layout(local_size_x = 1) in;
layout(std430, binding = 0) writeonly buffer Targets { uint b_target[]; } b_targets[BINDINGS];

void main() {
    for (int i = 0; i < BINDINGS; ++i) b_targets[i].b_target[0] = 0u;
}
