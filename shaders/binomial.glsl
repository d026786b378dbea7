// The 5-tap binomial filter (1 4 6 4 1) / 16, and where its taps fall beyond the border.
const float BINOMIAL[5] = float[](0.0625, 0.25, 0.375, 0.25, 0.0625);

// Mirror about the first and last sample (reflect-101), for taps at most two samples outside. Sides of 1 and 2 too.
int mirrored(int i, int n) {
    i = abs(i);
    if (i >= n) i = abs(2 * (n - 1) - i);
    return min(i, n - 1);
}
