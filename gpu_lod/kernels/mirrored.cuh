// Of n samples in a row, the one that stands for place i: mirrored about the outermost ones.
#pragma once

__device__ __forceinline__ int mirrored(int i, int n) {
    if (n == 1) return 0;
    while ((unsigned)i >= (unsigned)n) i = i < 0 ? -i : 2 * n - 2 - i;  // more than once where n is tiny
    return i;
}
