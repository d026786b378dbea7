// Four times the binomial over a coarser level's samples with zeros between them, as OpenCV's pyrUp: mirrored before the
// first sample, repeated after the last.

// The three coarse samples that a fine one rests on, and their weights: 1 6 1 on a sample, 0 4 4 between two, over 8.
ivec3 taps(int at, int n) {
    int i = at >> 1;
    int before = i == 0 ? min(1, n - 1) : i - 1;
    return ivec3(before, i, min(i + 1, n - 1));
}
vec3 weights(int at) { return (at & 1) == 0 ? vec3(0.125, 0.75, 0.125) : vec3(0.0, 0.5, 0.5); }
