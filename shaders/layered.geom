#version 430
// Sends each instance to its layer. (A vertex shader may write gl_Layer only with an extension.)
layout(triangles) in;
layout(triangle_strip, max_vertices = 3) out;
in int v_layer[];

void main() {
    for (int i = 0; i < 3; ++i) {
        gl_Position = gl_in[i].gl_Position;
        gl_Layer = v_layer[i];
        EmitVertex();
    }
    EndPrimitive();
}
