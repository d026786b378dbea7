// The pictures that superpixels are made of: colours scaled to [0, 1] by each picture's least and greatest value, in
// Lab (D65, 2 degrees), and divided by the compactness; grey as (grey, 0, 0). A thread for each pixel.
#include "block.cuh"

struct Lab {
    const float* pictures;      // [images, channels, pixels]
    double* colours;            // [images, pixels, 3]
    unsigned long long stride;  // from picture to picture
    double ratio;
    int channels, pixels;  // channels: 1 or 3
    int tiles;             // of THREADS pixels, in a picture
};

// As scikit-image computes it: rounded one by one, but for the sums of products, which its BLAS fuses.
__device__ __forceinline__ double linear(double value) {
    return value > 0.04045 ? pow(__dadd_rn(value, 0.055) / 1.055, 2.4) : value / 12.92;
}
__device__ __forceinline__ double part_of_white(double r, double g, double b, double of_r, double of_g, double of_b,
                                                double white) {
    double part = fma(b, of_b, fma(g, of_g, __dmul_rn(r, of_r))) / white;
    return part > 0.008856 ? cbrt(part) : __dadd_rn(__dmul_rn(7.787, part), 16.0 / 116.0);
}

extern "C" __global__ void __launch_bounds__(THREADS) lab(const Lab p) {
    __shared__ float shared[THREADS];
    unsigned image = blockIdx.x / (unsigned)p.tiles;
    const float* picture = p.pictures + image * p.stride;
    const float infinity = __uint_as_float(0x7f800000u);
    float highest = -infinity, lowest = -infinity;  // the latter of values turned round
    for (int i = (int)threadIdx.x; i < p.channels * p.pixels; i += THREADS) {
        highest = higher(highest, picture[i]);
        lowest = higher(lowest, -picture[i]);
    }
    double low = -(double)highest_of_block(lowest, shared), range = (double)highest_of_block(highest, shared) - low;
    if (range == 0.0) range = 1.0;
    int at = (int)(blockIdx.x - image * (unsigned)p.tiles) * THREADS + (int)threadIdx.x;
    if (at >= p.pixels) return;
    const float* pixel = picture + at;
    double* colour = p.colours + 3 * ((unsigned long long)image * (unsigned)p.pixels + (unsigned)at);
    double r = ((double)pixel[0] - low) / range;
    if (p.channels == 1) {
        colour[0] = r * p.ratio, colour[1] = colour[2] = 0.0;
        return;
    }
    double g = ((double)pixel[p.pixels] - low) / range, b = ((double)pixel[2ll * p.pixels] - low) / range;
    r = linear(r), g = linear(g), b = linear(b);
    double x = part_of_white(r, g, b, 0.412453, 0.357580, 0.180423, 0.95047);
    double y = part_of_white(r, g, b, 0.212671, 0.715160, 0.072169, 1.0);
    double z = part_of_white(r, g, b, 0.019334, 0.119193, 0.950227, 1.08883);
    colour[0] = __dadd_rn(__dmul_rn(116.0, y), -16.0) * p.ratio;
    colour[1] = 500.0 * (x - y) * p.ratio;
    colour[2] = 200.0 * (y - z) * p.ratio;
}
