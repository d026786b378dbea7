#version 430
// The energy G2^2 + H2^2 of planes at up to four angles, in one pass. An invocation makes RUN rows of COLUMNS neighbours: it
// filters each row it needs once, and no intermediate result goes through memory.
//
// COLUMNS        1, or 4: then all arithmetic is on four neighbours at once
// FETCHED        loads.glsl: the source is a buffer texture
// ALIGNED, HALF  with 4: tile.glsl; rows of two groups at least
// RUN            4 or 8
// ORIENTATIONS   angles in this dispatch, 1 to 4, each with a target of its own
// FOUR           they are 0, 45, 90 and 135 degrees, which have most of their sums in common
// SMALL          a side is shorter than the filter's reach, so that the mirror's mirror is seen
#include "steerable.glsl"
#include "tile.glsl"

layout(local_size_x = LOCAL_SIZE) in;
#ifdef FETCHED
layout(binding = 1) uniform samplerBuffer b_source;
#else
layout(std430, binding = 1) readonly buffer Source { READ b_source[]; };
#endif
layout(std430, binding = 0) writeonly buffer Target0 { MADE b_target0[]; };
layout(std430, binding = 2) writeonly buffer Target1 { MADE b_target1[]; };
layout(std430, binding = 3) writeonly buffer Target2 { MADE b_target2[]; };
layout(std430, binding = 4) writeonly buffer Target3 { MADE b_target3[]; };

uniform ivec2 u_size;
uniform int u_source_first;  // index in b_source of texel 0 of the first plane; negative if bound from a later row
uniform ivec2 u_rows;        // first row made, and the one after the last
uniform ivec4 u_first;       // index of texel 0 of the first plane's target
uniform int u_stride;        // elements from one plane's target to the next's
#ifndef FOUR
uniform mat4 u_second;       // column k: how much of Gxx, Gxy, Gyy at angle k
uniform mat4 u_third;        // and of Hxxx, Hxxy, Hxyy, Hyyy
#endif

#if COLUMNS == 4
#define V vec4
#else
#define V float
#endif

// Mirrored about the outermost samples (reflect-101).
int reflected(int i, int n) {
#ifdef SMALL
    int period = max(2 * n - 2, 1);
    i = abs(i) % period;
    return min(i, period - i) % n;
#else
    return n - 1 - abs(n - 1 - abs(i));
#endif
}

// A row through the filters that G2 and H2 are made of.
struct Row { V gaussian, tilted, curved, cubic, mixed; };

Row row(int origin, int x, int y) {
    int from = origin + reflected(y, u_size.y) * u_size.x;
    V m4, m3, m2, m1, c, p1, p2, p3, p4;
#ifdef ALIGNED
    int at = (from + x) >> 2;
    bool first = x == 0, last = x + 4 == u_size.x;
    vec4 centre = LOAD4(b_source, at);
    vec4 left = LOAD4(b_source, at + (first ? 1 : -1)), right = LOAD4(b_source, at + (last ? -1 : 1));
    vec4 l = first ? vec4(left.x, centre.wzy) : left, r = last ? vec4(centre.zyx, right.w) : right;
#elif COLUMNS == 4
    // What lies beyond the mirror is read for neighbours outside the image alone.
#define AT(i_) LOAD1(b_source, from + max(reflected(x + (i_), u_size.x), 0))
    vec4 l = vec4(AT(-4), AT(-3), AT(-2), AT(-1)), centre = vec4(AT(0), AT(1), AT(2), AT(3));
    vec4 r = vec4(AT(4), AT(5), AT(6), AT(7));
#endif
#if COLUMNS == 4
    m4 = l, m3 = vec4(l.yzw, centre.x), m2 = vec4(l.zw, centre.xy), m1 = vec4(l.w, centre.xyz), c = centre;
    p1 = vec4(centre.yzw, r.x), p2 = vec4(centre.zw, r.xy), p3 = vec4(centre.w, r.xyz), p4 = r;
#else
#define AT(i_) LOAD1(b_source, from + reflected(x + (i_), u_size.x))
    m4 = AT(-4), m3 = AT(-3), m2 = AT(-2), m1 = AT(-1), c = AT(0), p1 = AT(1), p2 = AT(2), p3 = AT(3), p4 = AT(4);
#endif
    V s1 = p1 + m1, s2 = p2 + m2, s3 = p3 + m3, s4 = p4 + m4;
    V d1 = p1 - m1, d2 = p2 - m2, d3 = p3 - m3, d4 = p4 - m4;
    return Row(
        c * EVEN[0].x + s1 * EVEN[1].x + s2 * EVEN[2].x + s3 * EVEN[3].x + s4 * EVEN[4].x,
        d1 * ODD[1].x + d2 * ODD[2].x + d3 * ODD[3].x + d4 * ODD[4].x,
        c * EVEN[0].y + s1 * EVEN[1].y + s2 * EVEN[2].y + s3 * EVEN[3].y + s4 * EVEN[4].y,
        d1 * ODD[1].y + d2 * ODD[2].y + d3 * ODD[3].y + d4 * ODD[4].y,
        c * EVEN[0].z + s1 * EVEN[1].z + s2 * EVEN[2].z + s3 * EVEN[3].z + s4 * EVEN[4].z);
}

#define EVEN_OF(p, w) (e.p * EVEN[0].w + (d.p + f.p) * EVEN[1].w + (c.p + g.p) * EVEN[2].w + (b.p + h.p) * EVEN[3].w \
    + (a.p + i.p) * EVEN[4].w)
#define ODD_OF(p, w) ((f.p - d.p) * ODD[1].w + (g.p - c.p) * ODD[2].w + (h.p - b.p) * ODD[3].w + (i.p - a.p) * ODD[4].w)
#if COLUMNS == 4
#define PUT(target, first, energy) STORE(target, first + at, x, u_size.x, energy)
#else
#define PUT(target, first, energy) target[first + at] = energy;
#endif
#ifndef FOUR
V energy(int k, V gxx, V gxy, V gyy, V hxxx, V hxxy, V hxyy, V hyyy) {
    V even = gxx * u_second[k].x + gxy * u_second[k].y + gyy * u_second[k].z;
    V odd = hxxx * u_third[k].x + hxxy * u_third[k].y + hxyy * u_third[k].z + hyyy * u_third[k].w;
    return even * even + odd * odd;
}
#endif

// The middle one of nine rows.
void make(int x, int y, int at, Row a, Row b, Row c, Row d, Row e, Row f, Row g, Row h, Row i) {
    if (y >= u_rows.y) return;
    V gxx = EVEN_OF(curved, x), gxy = CROSS * ODD_OF(tilted, x), gyy = EVEN_OF(gaussian, y);
    V hxxx = EVEN_OF(cubic, x), hxxy = ODD_OF(mixed, x), hxyy = EVEN_OF(tilted, z), hyyy = ODD_OF(gaussian, y);
#ifdef FOUR
    const float cube = 0.35355339059327373;  // of cos 45
    V even = 0.5 * (gxx + gyy);
    V sum = cube * (hxxx + hyyy) + 3.0 * cube * (hxxy + hxyy), less = cube * (hyyy - hxxx) + 3.0 * cube * (hxxy - hxyy);
    PUT(b_target0, u_first.x, gxx * gxx + hxxx * hxxx)
    PUT(b_target1, u_first.y, (even + gxy) * (even + gxy) + sum * sum)
    PUT(b_target2, u_first.z, gyy * gyy + hyyy * hyyy)
    PUT(b_target3, u_first.w, (even - gxy) * (even - gxy) + less * less)
#else
#define ENERGY(k) energy(k, gxx, gxy, gyy, hxxx, hxxy, hxyy, hyyy)
    PUT(b_target0, u_first.x, ENERGY(0))
#if ORIENTATIONS > 1
    PUT(b_target1, u_first.y, ENERGY(1))
#endif
#if ORIENTATIONS > 2
    PUT(b_target2, u_first.z, ENERGY(2))
#endif
#if ORIENTATIONS > 3
    PUT(b_target3, u_first.w, ENERGY(3))
#endif
#endif
}

#define MAKE(i_, a, b, c, d, e, f, g, h, i) make(x, y + i_, at + i_ * u_size.x, a, b, c, d, e, f, g, h, i);

void main() {
    int x = int(gl_GlobalInvocationID.x) * COLUMNS, plane = int(gl_GlobalInvocationID.z);
    if (x >= u_size.x) return;
    int y = u_rows.x + int(gl_GlobalInvocationID.y) * RUN, at = plane * u_stride + y * u_size.x + x;
    int origin = u_source_first + plane * u_size.x * u_size.y;
    // Names and no array: a compiler that keeps the loop over it would keep it in memory.
#define ROW(i_) row(origin, x, min(y + i_ - 4, u_rows.y + 3))
    Row a = ROW(0), b = ROW(1), c = ROW(2), d = ROW(3), e = ROW(4), f = ROW(5), g = ROW(6), h = ROW(7), i = ROW(8);
    MAKE(0, a, b, c, d, e, f, g, h, i)
    Row j = ROW(9);
    MAKE(1, b, c, d, e, f, g, h, i, j)
    Row k = ROW(10);
    MAKE(2, c, d, e, f, g, h, i, j, k)
    Row l = ROW(11);
    MAKE(3, d, e, f, g, h, i, j, k, l)
#if RUN > 4
    Row m = ROW(12);
    MAKE(4, e, f, g, h, i, j, k, l, m)
    Row n = ROW(13);
    MAKE(5, f, g, h, i, j, k, l, m, n)
    Row o = ROW(14);
    MAKE(6, g, h, i, j, k, l, m, n, o)
    Row p = ROW(15);
    MAKE(7, h, i, j, k, l, m, n, o, p)
#endif
}
