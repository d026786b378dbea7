// Superpixels that hang together, of pixels' nearest centres: parts of at least `least` pixels are numbered in the
// order of their first pixels, smaller ones go to a neighbour. A block for each picture.
#define THREADS 1024
#include "block.cuh"

#define ROOM 4096  // pixels of a picture that is kept in shared memory, where to wait for one takes a tenth of the time

struct Connected {
    const int* labels;   // [images, pixels]
    int* scratch;        // [images, 3, pixels], of pictures of more than ROOM
    long long* regions;  // [images, pixels], from 0 on
    int rows, columns;
    int least, most;     // pixels of a part: what hangs together and is more than `most` is cut into several
};

// Place: a type that has room for one of a pixel.
template <class Place> struct Picture {
    int rows, columns;
    unsigned long long part_of_row;  // 2^32 / columns, rounded up
    int* whole;   // of each pixel: the first of all that hang together; once searched -1 less the first of its part
    Place* next;  // the one that the search for its part came to after it
    int* number;  // of a part, at its first pixel: how many pixels it has; then its number, or of a small one -1 less
                  // the first pixel of the part that it goes to

    // As pixel % columns is, of up to 2^16 of them, which a search would wait for at every step.
    __device__ __forceinline__ int column(int pixel) const {
        return pixel - (int)((unsigned long long)pixel * part_of_row >> 32) * columns;
    }
    // In the order of a search: to the right, left, below, above; -1 if there is none.
    __device__ __forceinline__ int neighbour(int pixel, int x, int i) const {
        if (i == 0) return x + 1 < columns ? pixel + 1 : -1;
        if (i == 1) return x > 0 ? pixel - 1 : -1;
        int other = i == 2 ? pixel + columns : pixel - columns;
        return other < rows * columns ? other : -1;
    }
    // The first of a pixel's part, once all parts that are not what hangs together are searched.
    __device__ __forceinline__ int part(int pixel) const {
        int first = whole[pixel];
        return first < 0 ? -1 - first : first;
    }
};

__device__ __forceinline__ int first_of(const volatile int* whole, int pixel) {
    while (whole[pixel] < pixel) pixel = whole[pixel];
    return pixel;
}

// Whatever other threads unite meanwhile.
__device__ __forceinline__ void unite(volatile int* whole, int pixel, int other) {
    for (;;) {
        pixel = first_of(whole, pixel), other = first_of(whole, other);
        if (pixel == other) return;
        int later = pixel > other ? pixel : other, earlier = pixel > other ? other : pixel;
        int before = atomicMin((int*)whole + later, earlier);
        if (before == later) return;
        pixel = before, other = earlier;  // which it belonged to already, by another thread
    }
}

// Breadth first from a pixel on, which none did come to before: how many pixels the part has.
template <class Place> __device__ __forceinline__ int searched(const Picture<Place>& p, int first, int most) {
    int whole = p.whole[first], size = 1, last = first, pixel = first;
    p.whole[first] = -1 - first;
    for (int turn = 0; turn < size && size < most; ++turn, pixel = p.next[pixel]) {
        int x = p.column(pixel), others[4];
        bool unsearched[4];  // read at once, and not one after the other
        for (int i = 0; i < 4; ++i) {
            others[i] = p.neighbour(pixel, x, i);
            unsearched[i] = others[i] >= 0 && p.whole[others[i]] == whole;
        }
        for (int i = 0; i < 4; ++i) {
            if (!unsearched[i] || size >= most) continue;
            p.whole[others[i]] = -1 - first;
            p.next[last] = (Place)others[i];
            last = others[i], ++size;
        }
    }
    return size;
}

// Of the parts that begin before a part of so many pixels does: the one that its search met last. Its own, if there is
// none.
template <class Place> __device__ __forceinline__ int met(const Picture<Place>& p, int first, int size) {
    int found = first, pixel = first;
    for (int turn = 0; turn < size; ++turn, pixel = p.next[pixel]) {
        int x = p.column(pixel);
        for (int i = 0; i < 4; ++i) {
            int other = p.neighbour(pixel, x, i), part = other >= 0 ? p.part(other) : first;
            if (part < first) found = part;
        }
    }
    return found;
}

template <class Place>
__device__ __forceinline__ void connect(const Connected& p, const Picture<Place>& picture, int* counts) {
    int me = (int)threadIdx.x, pixels = p.rows * p.columns, columns = p.columns;
    const int* labels = p.labels + (unsigned long long)blockIdx.x * (unsigned)pixels;
    long long* regions = p.regions + (unsigned long long)blockIdx.x * (unsigned)pixels;
    volatile int* whole = picture.whole;  // which threads read while others write it
    int* number = picture.number;
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        bool joined = picture.column(pixel) > 0 && labels[pixel - 1] == labels[pixel];
        whole[pixel] = joined ? pixel - 1 : pixel;
        number[pixel] = 0;
    }
    __syncthreads();
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        int above = pixel - columns, label = labels[pixel];
        if (above < 0 || labels[above] != label) continue;
        // The pixel to the left does it for both.
        if (picture.column(pixel) > 0 && labels[pixel - 1] == label && labels[above - 1] == label) continue;
        unite(whole, pixel, above);
    }
    __syncthreads();
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        int first = first_of(whole, pixel);
        whole[pixel] = first;
        atomicAdd(number + first, 1);
    }
    __syncthreads();

    // In which order a search comes to pixels matters where it cuts, and where what it meets last counts. A thread for
    // all that hangs together.
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        if (whole[pixel] != pixel) continue;
        int left = number[pixel];
        if (left >= p.least && left <= p.most) continue;
        left -= number[pixel] = searched(picture, pixel, p.most);
        for (int rest = pixel + 1; left > 0 && rest < pixels;) {
            int step = 4;  // pixels that are read at once
            for (int i = 3; i >= 0; --i)
                if (picture.whole[min(rest + i, pixels - 1)] == pixel) step = i;
            rest += step;
            if (step < 4) left -= number[rest] = searched(picture, rest, p.most);
        }
    }
    __syncthreads();
    int each = (pixels + THREADS - 1) / THREADS, begin = min(me * each, pixels), end = min(begin + each, pixels);
    int large = 0;
    for (int pixel = begin; pixel < end; ++pixel) large += picture.part(pixel) == pixel && number[pixel] >= p.least;
    large = sum_before_in_block(large, counts);
    for (int pixel = begin; pixel < end; ++pixel) {
        if (picture.part(pixel) != pixel) continue;
        int size = number[pixel];
        number[pixel] = size >= p.least ? large++ : -1 - met(picture, pixel, size);
    }
    __syncthreads();
    for (int pixel = me; pixel < pixels; pixel += THREADS) {
        int first = picture.part(pixel);
        // Only what begins at the first pixel of all may meet none. It has the first number, as the first large one
        // has.
        while (first > 0 && number[first] < 0) first = -1 - number[first];
        regions[pixel] = max(number[first], 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) connected(const Connected p) {
    __shared__ int counts[THREADS];
    __shared__ int whole[ROOM], number[ROOM];
    __shared__ short next[ROOM];
    int pixels = p.rows * p.columns;
    unsigned long long part_of_row = 0xffffffffull / (unsigned)p.columns + 1ull;
    if (pixels <= ROOM) {
        Picture<short> picture = {p.rows, p.columns, part_of_row, whole, next, number};
        connect(p, picture, counts);
    } else {
        int* scratch = p.scratch + 3ull * blockIdx.x * (unsigned)pixels;
        Picture<int> picture = {p.rows, p.columns, part_of_row, scratch, scratch + pixels, scratch + 2ll * pixels};
        connect(p, picture, counts);
    }
}
