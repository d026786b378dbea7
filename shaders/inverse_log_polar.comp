#version 430
// A log-polar map back in the picture's frame: each pixel reads the map at its own ring and wedge, bilinear, buffer to
// buffer. Wedges go round; inside the first ring and beyond the last the nearest ring is read.
//
// PER_WORD, FETCHED (words.glsl), WHOLE_ROWS (place.glsl)
// CORTICAL      rings are uniform in ln(1 + r / e0); without it in ln r
// BORDER_ZERO   pixels farther than the last ring's outer edge are 0
#include "words.glsl"
#include "place.glsl"
#define REALS float
#define INTS int
#include "polar.glsl"

layout(local_size_x = LOCAL_SIZE) in;
layout(std430, binding = 0) writeonly buffer Target { uint b_target[]; };
#ifdef FETCHED
layout(binding = 1) uniform TEXELS_OF b_source;
#define LOAD(index_) FETCH(b_source, index_)
#else
layout(std430, binding = 1) readonly buffer Source { uint b_source[]; };
#define LOAD(index_) to_float(ELEMENT(b_source, index_))
#endif
layout(std430, binding = 2) readonly buffer Fixations { vec2 b_fixations[]; };

uniform ivec2 u_map_size;     // (wedges, rings)
uniform int u_source_first;   // index in b_source of texel 0 of the chunk's first plane
uniform int u_first_plane;
uniform int u_channels;
uniform vec2 u_pixel;         // 1 / (width, height)
uniform vec2 u_box;           // (width, height) / longer side
uniform vec3 u_radii;         // where the rings begin (log) or e0 (cortical), where they end, rings / their ln ratio

float sampled(int origin, int plane, ivec2 at) {
    vec2 away = ((vec2(at) + 0.5) * u_pixel - b_fixations[plane / u_channels]) * u_box;
    float r = length(away);
#ifdef BORDER_ZERO
    if (r > u_radii.y) return 0.0;
#endif
#ifdef CORTICAL
    float ring = exact_log(1.0 + r / u_radii.x) * u_radii.z - 0.5;
#else
    float ring = exact_log(max(r, 1e-30) / u_radii.x) * u_radii.z - 0.5;
#endif
    float wedge = turns(away.y, away.x) * float(u_map_size.x) - 0.5;
    ring = clamp(ring, 0.0, float(u_map_size.y - 1));
    int ring0 = min(int(ring), u_map_size.y - 1), ring1 = min(ring0 + 1, u_map_size.y - 1);
    int wedge0 = int(floor(wedge)), wedge1 = wedge0 + 1;
    float across = ring - float(ring0), along = wedge - float(wedge0);
    if (wedge0 < 0) wedge0 += u_map_size.x;  // below the first one is the last
    if (wedge1 < 0) wedge1 += u_map_size.x;
    if (wedge1 == u_map_size.x) wedge1 = 0;
    int row0 = origin + ring0 * u_map_size.x, row1 = origin + ring1 * u_map_size.x;
    float a = LOAD(uint(row0 + wedge0)), b = LOAD(uint(row0 + wedge1));
    float c = LOAD(uint(row1 + wedge0)), d = LOAD(uint(row1 + wedge1));
    float inner = a + (b - a) * along, outer = c + (d - c) * along;
    return inner + (outer - inner) * across;
}

void main() {
    Place p = place();
    if (!p.inside) return;
    int plane_size = u_map_size.x * u_map_size.y;
    float value[PER_WORD];
    for (int k = 0; k < PER_WORD; ++k) {
        value[k] = 0.0;
        if (holds(p, k)) {
            value[k] = sampled(u_source_first + int(p.plane) * plane_size, u_first_plane + int(p.plane), p.at);
        }
        advance(p);
    }
    b_target[p.word] = pack(VALUES_OF(value));
}
