// Max and min of texels in floating point. A footprint that holds a NaN is NaN; GLSL leaves max(NaN, x) open, and isnan
// may be optimised away.
bvec4 is_nan(vec4 v) { return greaterThan(floatBitsToUint(v) & 0x7fffffffu, uvec4(0x7f800000u)); }

vec4 reduce(vec4 a, vec4 b) {
#ifdef REDUCE_MAX
    vec4 best = max(a, b);
#else
    vec4 best = min(a, b);
#endif
    return mix(mix(best, b, is_nan(b)), a, is_nan(a));
}
