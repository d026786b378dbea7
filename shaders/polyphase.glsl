// Weights of the box footprint along one side: the polyphase filter of Guthe and Heckbert, "Non-Power-of-Two Mipmapping".
// Output i of m; taps is 2 for an even side n = 2m, 3 for an odd side n = 2m + 1, 1 where the side is 1 already.
vec3 weights(int i, int m, int taps) {
    if (taps == 1) return vec3(1.0, 0.0, 0.0);
    if (taps == 2) return vec3(0.5, 0.5, 0.0);
    precise vec2 outer = vec2(float(m - i), float(i + 1)) / float(2 * m + 1);
    precise float middle = 1.0 - outer.x - outer.y;  // quotients may be off, but the sum is 1
    return vec3(outer.x, middle, outer.y);
}
