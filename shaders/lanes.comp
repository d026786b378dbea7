#version 430
// What lanes.glsl does here, an invocation at a time: whether lanes meet, its lane, and the lanes that it can read.
// THREADS_X, THREADS_Y  shape of the workgroup
#include "lanes.glsl"

layout(local_size_x = THREADS_X, local_size_y = THREADS_Y) in;
layout(std430, binding = 0) writeonly buffer Found { int b_found[]; };

void main() {
    int first = 8 * int(gl_LocalInvocationIndex), lane = LANE;
    bool meet = LANES_MEET(16, THREADS_X * THREADS_Y);
    b_found[first] = int(meet);
    b_found[first + 1] = lane;
    if (meet) {
        LANES_TOGETHER;
        b_found[first + 2] = int(OTHER_LANE(uint(lane), 1u));
        b_found[first + 3] = int(OTHER_LANE(uint(lane), 2u));
        b_found[first + 4] = int(OTHER_LANE(uint(lane), 3u));
        b_found[first + 5] = int(OTHER_LANE(float(lane), 4u));
        b_found[first + 6] = int(OTHER_LANE(float(lane), 8u));
        b_found[first + 7] = int(OTHER_LANE(float(lane), 12u));
    }
}
