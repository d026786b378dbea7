#version 430
// What a pixel's features say of coarser scales: saliency, and the energies of Laplacian bands 1 to 4. Each level is read
// bilinearly at x / 2^level; an invocation makes a tile of 4 x 4 pixels, which lies between the same samples of a level.
//
// ALIGNED, HALF, FETCHED   tile.glsl
#include "tile.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer First { MADE b_first[]; };    // channel 5
#ifdef FETCHED  // the Gaussian, and the band's square
layout(binding = 1) uniform samplerBuffer b_level1;
layout(binding = 2) uniform samplerBuffer b_level2;
layout(binding = 3) uniform samplerBuffer b_level3;
layout(binding = 4) uniform samplerBuffer b_level4;
layout(binding = 5) uniform samplerBuffer b_level5;
#else
layout(std430, binding = 1) readonly buffer Level1 { TWO_FLOATS b_level1[]; };
layout(std430, binding = 2) readonly buffer Level2 { TWO_FLOATS b_level2[]; };
layout(std430, binding = 3) readonly buffer Level3 { TWO_FLOATS b_level3[]; };
layout(std430, binding = 4) readonly buffer Level4 { TWO_FLOATS b_level4[]; };
layout(std430, binding = 5) readonly buffer Level5 { TWO_FLOATS b_level5[]; };
#endif
layout(std430, binding = 6) writeonly buffer Second { MADE b_second[]; };  // 33 to 36

uniform ivec2 u_size;
uniform ivec2 u_rows;  // first row made, a multiple of 4, and the one after the last
uniform ivec2 u_size1;
uniform ivec2 u_size2;
uniform ivec2 u_size3;
uniform ivec2 u_size4;
uniform ivec2 u_size5;
uniform ivec4 u_level;  // index of texel 0 of the first image in levels 1 to 4, and in level 5
uniform int u_level5;
uniform ivec2 u_first;   // index of texel 0 of each target, had it all rows
uniform ivec2 u_stride;  // in the targets: from channel to channel, from image to image

// Between two samples, at the tile's four pixels.
struct Tile { vec4 value[2], energy[2]; };

#define BETWEEN(buffer_, first_, size_, level_) \
    { \
        ivec2 i = min(ivec2(x, y) >> level_, size_ - 1), j = min((ivec2(x, y) >> level_) + 1, size_ - 1); \
        int top = first_ + image * size_.x * size_.y + i.y * size_.x, bottom = top + (j.y - i.y) * size_.x; \
        vec2 a = LOAD2(buffer_, top + i.x), b = LOAD2(buffer_, top + j.x); \
        vec2 c = LOAD2(buffer_, bottom + i.x), d = LOAD2(buffer_, bottom + j.x); \
        vec4 f = (float(x & ((1 << level_) - 1)) + vec4(0.0, 1.0, 2.0, 3.0)) / float(1 << level_); \
        t.value[0] = a.x + (b.x - a.x) * f, t.value[1] = c.x + (d.x - c.x) * f; \
        t.energy[0] = a.y + (b.y - a.y) * f, t.energy[1] = c.y + (d.y - c.y) * f; \
    }
#define DOWN(part, level_, row) mix(part[0], part[1], (float(y & ((1 << level_) - 1)) + float(row)) / float(1 << level_))

struct Row { vec4 value, energy; };

// Level 1 has a sample at every other pixel.
Row row1(int image, int x, int y) {
    int from = u_level.x + (image * u_size1.y + min(y, u_size1.y - 1)) * u_size1.x, i = x >> 1, last = u_size1.x - 1;
    vec2 a = LOAD2(b_level1, from + min(i, last)), b = LOAD2(b_level1, from + min(i + 1, last));
    vec2 c = LOAD2(b_level1, from + min(i + 2, last));
    return Row(vec4(a.x, (a.x + b.x) * 0.5, b.x, (b.x + c.x) * 0.5), vec4(a.y, (a.y + b.y) * 0.5, b.y, (b.y + c.y) * 0.5));
}

void make(int row, int x, int y, int at, vec4 value1, vec4 energy1, Tile t2, Tile t3, Tile t4, Tile t5) {
    if (y + row >= u_rows.y) return;
    vec4 value3 = DOWN(t3.value, 3, row);
    vec4 found = abs(value1 - value3) + abs(DOWN(t2.value, 2, row) - DOWN(t4.value, 4, row))
        + abs(value3 - DOWN(t5.value, 5, row));
    at += row * u_size.x;
    STORE(b_first, u_first.x + at, x, u_size.x, found / 3.0)
    STORE(b_second, u_first.y + at, x, u_size.x, energy1)
    STORE(b_second, u_first.y + at + u_stride.x, x, u_size.x, DOWN(t2.energy, 2, row))
    STORE(b_second, u_first.y + at + 2 * u_stride.x, x, u_size.x, DOWN(t3.energy, 3, row))
    STORE(b_second, u_first.y + at + 3 * u_stride.x, x, u_size.x, DOWN(t4.energy, 4, row))
}

void main() {
    int x = int(gl_GlobalInvocationID.x) * 4;
    if (x >= u_size.x) return;
    int y = u_rows.x + int(gl_GlobalInvocationID.y) * 4, image = int(gl_GlobalInvocationID.z);
    int at = image * u_stride.y + y * u_size.x + x;
    Tile t, t2, t3, t4, t5;
    BETWEEN(b_level2, u_level.y, u_size2, 2)
    t2 = t;
    BETWEEN(b_level3, u_level.z, u_size3, 3)
    t3 = t;
    BETWEEN(b_level4, u_level.w, u_size4, 4)
    t4 = t;
    BETWEEN(b_level5, u_level5, u_size5, 5)
    t5 = t;
    Row a = row1(image, x, (y >> 1)), b = row1(image, x, (y >> 1) + 1), c = row1(image, x, (y >> 1) + 2);
    make(0, x, y, at, a.value, a.energy, t2, t3, t4, t5);
    make(1, x, y, at, (a.value + b.value) * 0.5, (a.energy + b.energy) * 0.5, t2, t3, t4, t5);
    make(2, x, y, at, b.value, b.energy, t2, t3, t4, t5);
    make(3, x, y, at, (b.value + c.value) * 0.5, (b.energy + c.energy) * 0.5, t2, t3, t4, t5);
}
