// A row of a coarser level at four columns of the finer one, from column x on, a multiple of four: expansion.glsl's weights.
// `row` is the index of the row's first sample in b_coarse. Needs loads.glsl, u_coarse_size.
vec4 widened(int row, int x) {
    int n = u_coarse_size.x, i = x >> 1;
    float a = LOAD1(b_coarse, row + (i == 0 ? min(1, n - 1) : i - 1)), b = LOAD1(b_coarse, row + i);
    float c = LOAD1(b_coarse, row + min(i + 1, n - 1)), d = LOAD1(b_coarse, row + min(i + 2, n - 1));
    return vec4((a + c) * 0.125 + b * 0.75, (b + c) * 0.5, (b + d) * 0.125 + c * 0.75, (c + d) * 0.5);
}
