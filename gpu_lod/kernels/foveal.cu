// A round of that search: a block for each image and e0 that is tried counts the sites within the fovea.
#include "foveal.cuh"
#include "spiral.cuh"

struct Foveal {
    Spiral spiral;
    Tried tried;
    double low, high;  // ln e0, what the first round tries between
    double radius;     // of the fovea
    int round;
};

extern "C" __global__ void __launch_bounds__(THREADS) foveal(const Foveal p) {
    __shared__ Selecting selecting;
    __shared__ int counts[THREADS];
    int image = (int)(blockIdx.x / TRIES), which = (int)(blockIdx.x % TRIES);
    double low = p.low, high = p.high;
    if (p.round > 0) {
        Found before = found_in(p.tried, p.round - 1, image);
        low = before.low, high = before.high;
    }
    double log = low + (high - low) * which / (TRIES - 1), e0 = exp(log);
    double* enters = p.spiral.enters + (unsigned long long)blockIdx.x * p.spiral.candidates;
    Smallest last = first_to_enter(p.spiral, image, e0, enters, selecting);
    double density = (last.kth + last.next) / 2.0, most = density * magnified(p.radius, e0);
    int within = 0;
    for (int i = (int)threadIdx.x; i < p.spiral.candidates; i += THREADS)
        within += enters[i] <= density && i + 0.5 <= most;
    within = sum_of_block(within, counts);
    if (threadIdx.x > 0) return;
    unsigned long long mine = ((unsigned long long)p.round * p.tried.images + image) * TRIES + which;
    p.tried.logs[mine] = log, p.tried.within[mine] = within;
}
