// Floats in pairs, as doubles: software renderers load and store an element of 64 bits in the time of one of 32.
vec2 two_of(double bits) { return uintBitsToFloat(unpackDouble2x32(bits)); }
vec4 four_of(dvec2 bits) { return vec4(two_of(bits.x), two_of(bits.y)); }
double pair_of(float a, float b) { return packDouble2x32(floatBitsToUint(vec2(a, b))); }
dvec2 pairs_of(vec4 v) { return dvec2(pair_of(v.x, v.y), pair_of(v.z, v.w)); }
