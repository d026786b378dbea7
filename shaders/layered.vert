#version 430
// One triangle that covers the viewport, an instance a layer.
out int v_layer;

void main() {
    v_layer = gl_InstanceID;
    gl_Position = vec4(gl_VertexID == 1 ? 3.0 : -1.0, gl_VertexID == 2 ? 3.0 : -1.0, 0.0, 1.0);
}
