// What that search has found: a thread for each image.
#include "foveal.cuh"

struct FovealE0 {
    Tried tried;
    double* e0;  // [images]
    int rounds;
};

extern "C" __global__ void __launch_bounds__(THREADS) foveal_e0(const FovealE0 p) {
    int image = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (image < p.tried.images) p.e0[image] = exp(found_in(p.tried, p.rounds - 1, image).best);
}
