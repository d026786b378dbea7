#version 430
// What a pixel's features say of its neighbourhood: Sobel's gradient, the absolute Laplacian band 0, the variance of 5 x 5.
// An invocation makes a tile of 4 x 4 pixels from 8 x 8 lumas.
//
// ALIGNED, HALF, FETCHED   tile.glsl; rows of one group at least
// SMALL     a side is shorter than the reach of two, so that the mirror's mirror is seen
// LAST      there is no coarser level, and so no band: 0
#include "tile.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer First { MADE b_first[]; };    // channels 6 to 8
#ifdef FETCHED
layout(binding = 1) uniform samplerBuffer b_luma;
layout(binding = 2) uniform samplerBuffer b_coarse;    // the Gaussian pyramid's level 1
#else
layout(std430, binding = 1) readonly buffer Luma { READ b_luma[]; };
layout(std430, binding = 2) readonly buffer Coarse { float b_coarse[]; };
#endif
layout(std430, binding = 4) writeonly buffer Second { MADE b_second[]; };  // 12
layout(std430, binding = 5) writeonly buffer Third { MADE b_third[]; };    // 37

uniform ivec2 u_size;
uniform ivec2 u_coarse_size;
uniform ivec2 u_rows;    // first row made, a multiple of 4, and the one after the last
uniform ivec2 u_source;  // index of texel 0 of the first image's luma and coarse level; negative if bound from a later row
uniform ivec3 u_first;   // index of texel 0 of each target, had it all rows
uniform ivec2 u_stride;  // in the targets: from channel to channel, from image to image

int reflected(int i, int n) {
#ifdef SMALL
    int period = max(2 * n - 2, 1);
    i = abs(i) % period;
    return min(i, period - i) % n;
#else
    return n - 1 - abs(n - 1 - abs(i));
#endif
}

// Four neighbours of a row, with what rests on their own row alone.
struct Row {
    vec4 centre, difference, smoothed;
    vec4 sum, squares;  // over five, of differences to a value near by
};

Row row(int origin, int x, int y, float near) {
    int from = origin + reflected(y, u_size.y) * u_size.x;
#ifdef ALIGNED
    int at = (from + x) >> 2;
    vec4 c = LOAD4(b_luma, at);
    vec2 l = LOAD4(b_luma, at - (x == 0 ? 0 : 1)).zw, r = LOAD4(b_luma, at + (x + 4 == u_size.x ? 0 : 1)).xy;
    if (x == 0) l = c.zy;
    if (x + 4 == u_size.x) r = c.zy;
#else
    // What lies beyond the mirror is read for neighbours outside the image alone.
#define AT(i_) LOAD1(b_luma, from + max(reflected(x + (i_), u_size.x), 0))
    vec2 l = vec2(AT(-2), AT(-1)), r = vec2(AT(4), AT(5));
    vec4 c = vec4(AT(0), AT(1), AT(2), AT(3));
#endif
    vec4 m1 = vec4(l.y, c.xyz), p1 = vec4(c.yzw, r.x);
    vec4 e = c - near, n1 = m1 - near, q1 = p1 - near, n2 = vec4(l, c.xy) - near, q2 = vec4(c.zw, r) - near;
    return Row(c, p1 - m1, m1 + 2.0 * c + p1, n2 + n1 + e + q1 + q2, n2 * n2 + n1 * n1 + e * e + q1 * q1 + q2 * q2);
}

#include "widened.glsl"

// A row of the coarser level at the tile's four columns.
vec4 coarse_row(int origin, int x, int y) {
#ifdef LAST
    return vec4(0.0);
#else
    return widened(origin + (y < 0 ? min(1, u_coarse_size.y - 1) : min(y, u_coarse_size.y - 1)) * u_coarse_size.x, x);
#endif
}

void make(int x, int y, int at, vec4 coarse, Row a, Row b, Row c, Row d, Row e) {
    if (y >= u_rows.y) return;
    vec4 gx = (b.difference + 2.0 * c.difference + d.difference) * 0.125, gy = (d.smoothed - b.smoothed) * 0.125;
    vec4 mean = (a.sum + b.sum + c.sum + d.sum + e.sum) * 0.04;
    vec4 squares = (a.squares + b.squares + c.squares + d.squares + e.squares) * 0.04;
    STORE(b_first, u_first.x + at, x, u_size.x, gx)
    STORE(b_first, u_first.x + at + u_stride.x, x, u_size.x, gy)
    STORE(b_first, u_first.x + at + 2 * u_stride.x, x, u_size.x, sqrt(gx * gx + gy * gy))
#ifdef LAST
    STORE(b_second, u_first.y + at, x, u_size.x, vec4(0.0))
#else
    STORE(b_second, u_first.y + at, x, u_size.x, abs(c.centre - coarse))
#endif
    vec4 variance = squares - mean * mean;
    // Rounding may make it negative. max() alone might make 0 of NaN, and isnan be optimised away.
    bvec4 nan = greaterThan(floatBitsToUint(variance) & 0x7fffffffu, uvec4(0x7f800000u));
    STORE(b_third, u_first.z + at, x, u_size.x, mix(max(variance, 0.0), variance, nan))
}

void main() {
    int x = int(gl_GlobalInvocationID.x) * 4;
    if (x >= u_size.x) return;
    int y = u_rows.x + int(gl_GlobalInvocationID.y) * 4, image = int(gl_GlobalInvocationID.z);
    int origin = u_source.x + image * u_size.x * u_size.y, at = image * u_stride.y + y * u_size.x + x;
    // Sums of squares are of differences to a value of the tile: those of the values would cancel.
#ifdef ALIGNED
    float near = LOAD4(b_luma, (origin + y * u_size.x + x) >> 2).x;
#else
    float near = LOAD1(b_luma, origin + y * u_size.x + x);
#endif
#define ROW(i_) row(origin, x, min(y + i_, u_rows.y + 1), near)
    int coarse = u_source.y + image * u_coarse_size.x * u_coarse_size.y, j = y >> 1;
    vec4 p = coarse_row(coarse, x, j - 1), q = coarse_row(coarse, x, j), r = coarse_row(coarse, x, j + 1);
    vec4 s = coarse_row(coarse, x, min(j + 2, ((u_rows.y - 1) >> 1) + 1));
    Row a = ROW(-2), b = ROW(-1), c = ROW(0), d = ROW(1), e = ROW(2), f = ROW(3), g = ROW(4), h = ROW(5);
    make(x, y, at, (p + r) * 0.125 + q * 0.75, a, b, c, d, e);
    make(x, y + 1, at + u_size.x, (q + r) * 0.5, b, c, d, e, f);
    make(x, y + 2, at + 2 * u_size.x, (q + s) * 0.125 + r * 0.75, c, d, e, f, g);
    make(x, y + 3, at + 3 * u_size.x, (r + s) * 0.5, d, e, f, g, h);
}
