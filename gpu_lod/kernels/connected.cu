// Superpixels that hang together, of pixels' nearest centres: parts of at least `least` pixels are numbered in the order of
// their first pixels, smaller ones go to a neighbour. A block for each picture.
#include "block.cuh"

struct Connected {
    const int* labels;   // [images, pixels]
    int* scratch;        // [images, 4, pixels]
    long long* regions;  // [images, pixels], from 0 on
    int rows, columns;
    int least, most;     // pixels of a part: what hangs together and is more than `most` is cut into several
};

struct Picture {
    int rows, columns;
    int* whole;   // of each pixel: the first of all that hang together
    int* part;    // the first of its part
    int* next;    // the one that the search for its part came to after it; of the last its own; -1: not searched yet
    int* number;  // of a part, at its first pixel: how many pixels it has; then its number, or of a small one -1 less the
                  // first pixel of the part that it goes to

    // In the order of a search: to the right, left, below, above; -1 if there is none.
    __device__ __forceinline__ int neighbour(int pixel, int x, int i) const {
        if (i == 0) return x + 1 < columns ? pixel + 1 : -1;
        if (i == 1) return x > 0 ? pixel - 1 : -1;
        int other = i == 2 ? pixel + columns : pixel - columns;
        return other < rows * columns ? other : -1;
    }
};

// Breadth first from a pixel on, which none did come to before: how many pixels the part has.
__device__ __forceinline__ int searched(const Picture& p, int first, int most) {
    int size = 1, last = first;
    p.next[first] = p.part[first] = first;
    for (int pixel = first; size < most; pixel = p.next[pixel]) {
        int x = pixel % p.columns;
        for (int i = 0; i < 4 && size < most; ++i) {
            int other = p.neighbour(pixel, x, i);
            if (other < 0 || p.whole[other] != p.whole[first] || p.next[other] >= 0) continue;
            p.part[other] = first;
            p.next[last] = p.next[other] = other;
            last = other, ++size;
        }
        if (pixel == last) break;
    }
    return size;
}

// Of the parts that begin before a part does: the one that its search met last. Its own, if there is none.
__device__ __forceinline__ int met(const Picture& p, int first) {
    int found = first;
    for (int pixel = first, before = -1; pixel != before; before = pixel, pixel = p.next[pixel]) {
        int x = pixel % p.columns;
        for (int i = 0; i < 4; ++i) {
            int other = p.neighbour(pixel, x, i);
            if (other >= 0 && p.part[other] < first) found = p.part[other];
        }
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS) connected(const Connected p) {
    __shared__ int counts[THREADS];
    int me = (int)threadIdx.x, pixels = p.rows * p.columns;
    const int* labels = p.labels + (unsigned long long)blockIdx.x * (unsigned)pixels;
    long long* regions = p.regions + (unsigned long long)blockIdx.x * (unsigned)pixels;
    int* scratch = p.scratch + 4ull * blockIdx.x * (unsigned)pixels;
    Picture picture = {p.rows, p.columns, scratch, scratch + pixels, scratch + 2ll * pixels, scratch + 3ll * pixels};
    volatile int* whole = picture.whole;  // which threads read while others write it
    int* number = picture.number;
    for (int pixel = me; pixel < pixels; pixel += THREADS) whole[pixel] = pixel, picture.next[pixel] = -1;
    __syncthreads();

    // Whatever of this round is read already: it only shortens the way, and the last round changes nothing.
    for (bool again = true; again;) {
        int changed = 0;
        for (int pixel = me; pixel < pixels; pixel += THREADS) {
            int x = pixel % p.columns, first = whole[pixel];
            for (int i = 0; i < 4; ++i) {
                int other = picture.neighbour(pixel, x, i);
                if (other >= 0 && labels[other] == labels[pixel]) first = min(first, whole[other]);
            }
            while (whole[first] < first) first = whole[first];
            changed += first < whole[pixel];
            whole[pixel] = first;
        }
        again = sum_of_block(changed, counts) > 0;
    }

    // A thread for all that hangs together.
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        if (whole[pixel] != pixel) continue;
        number[pixel] = searched(picture, pixel, p.most);
        if (number[pixel] < p.most) continue;
        for (int rest = pixel + 1; rest < pixels; ++rest)
            if (whole[rest] == pixel && picture.next[rest] < 0) number[rest] = searched(picture, rest, p.most);
    }
    __syncthreads();
    int each = (pixels + THREADS - 1) / THREADS, begin = min(me * each, pixels), end = min(begin + each, pixels);
    int large = 0;
    for (int pixel = begin; pixel < end; ++pixel)
        large += picture.part[pixel] == pixel && number[pixel] >= p.least;
    large = sum_before_in_block(large, counts);
    for (int pixel = begin; pixel < end; ++pixel)
        if (picture.part[pixel] == pixel) number[pixel] = number[pixel] >= p.least ? large++ : -1 - met(picture, pixel);
    __syncthreads();
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        int first = picture.part[pixel];
        // Only what begins at the first pixel of all may meet none. It has the first number, as the first large one does.
        while (first > 0 && number[first] < 0) first = -1 - number[first];
        regions[pixel] = max(number[first], 0);
    }
}
