// Which word of a planar output [planes, height, width] an invocation makes, and which element comes first in it.
// WHOLE_ROWS: rows are whole words, and the dispatch is (words of a row, rows, planes): no integer division, which costs a
//     software renderer as much as a texture fetch. Without it the dispatch is one-dimensional over any range of words.
// Needs words.glsl.
uniform ivec2 u_target_size;
uniform uint u_words;     // words of this chunk
uniform uint u_elements;  // elements of this chunk; the last word may hold fewer than PER_WORD
uniform uint u_start;     // where in its plane the chunk's first element is

struct Place {
    bool inside;
    uint word;
    uint first;  // element, counted from the chunk's first
    uint plane;  // counted from the chunk's first
    ivec2 at;
};

Place place() {
    Place p;
#ifdef WHOLE_ROWS
    uint per_row = uint(u_target_size.x) / uint(PER_WORD);
    uvec3 id = gl_GlobalInvocationID;
    p.inside = id.x < per_row;
    p.word = (id.z * uint(u_target_size.y) + id.y) * per_row + id.x;
    p.plane = id.z;
    p.at = ivec2(id.x * uint(PER_WORD), id.y);
#else
    // Dispatches of more than one row of workgroups pass the limit of 65535 workgroups a dimension.
    p.word = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * uint(LOCAL_SIZE) + gl_LocalInvocationIndex;
    p.inside = p.word < u_words;
    uint width = uint(u_target_size.x);
    uint area = width * uint(u_target_size.y);
    uint position = u_start + p.word * uint(PER_WORD);
    p.plane = position / area;
    uint in_plane = position - p.plane * area;
    uint y = in_plane / width;
    p.at = ivec2(in_plane - y * width, y);
#endif
    p.first = p.word * uint(PER_WORD);
    return p;
}

bool holds(Place p, int k) {
#ifdef WHOLE_ROWS
    return true;
#else
    return p.first + uint(k) < u_elements;
#endif
}

// To the next element of the word, which may lie over the end of a row, and of a plane.
void advance(inout Place p) {
    ++p.at.x;
#ifndef WHOLE_ROWS
    if (p.at.x == u_target_size.x) {
        p.at.x = 0;
        if (++p.at.y == u_target_size.y) {
            p.at.y = 0;
            ++p.plane;
        }
    }
#endif
}
