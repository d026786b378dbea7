// The threshold of a soft top-k, and each score's share in it: a block for each row of scores.
#include "select.cuh"

#define FAR 300.0     // so far beyond all thresholds that nothing is left of a sigmoid, and its exponential is a number
#define STEEP 1e-3    // where the sum falls more slowly, rounding says more than its slope
#define LITTLE 1e-7   // a step after which the next one, half its square at most, is none

struct Threshold {
    const double* logits;  // [rows, scores]
    double* centres;       // [rows], the middle between the last that counts and the next
    double* thresholds;    // [rows], from there
    double* shares;        // [rows, scores]: by how much each moves the threshold
    double tail;           // beyond it all sigmoids together are nothing
    int scores, count, halvings;
};

// Of sigmoids, and by how much that falls as the threshold rises.
struct Sums {
    double all, steep;
    __device__ __forceinline__ void operator+=(const Sums& other) { all += other.all, steep += other.steep; }
};

extern "C" __global__ void __launch_bounds__(THREADS) threshold(const Threshold p) {
    __shared__ Selecting selecting;
    __shared__ Sums sums[THREADS];
    int me = (int)threadIdx.x;
    unsigned long long first = (unsigned long long)blockIdx.x * p.scores;
    const double* logits = p.logits + first;
    double* shares = p.shares + first;
    auto value = [logits](int i) { return -logits[i]; };
    Smallest last = smallest_of_block(value, p.scores, p.count, selecting);
    double centre = (-last.kth - last.next) / 2.0, gap = (last.next - last.kth) / 2.0;
    double high = gap > p.tail ? 0.0 : gap + p.tail, low = -high, next = 0.0, middle = 0.0;
    // sigmoid(x - t) is e^x / (e^x + e^t): one exponential a turn, not one a score. Until the end shares hold e^x.
    for (int i = me; i < p.scores; i += THREADS) shares[i] = exp(fmin(fmax(logits[i] - centre, -FAR), FAR));
    bool near = false;
    for (int turn = 0; turn < p.halvings && !near; ++turn) {
        middle = next;
        double base = exp(middle);
        Sums sum = {0.0, 0.0};
        for (int i = me; i < p.scores; i += THREADS) {
            double soft = shares[i] / (shares[i] + base);
            sum += {soft, soft * (1.0 - soft)};
        }
        sum = sum_of_block(sum, sums);
        bool more = sum.all > (double)p.count;
        low = more ? middle : low;
        high = more ? high : middle;
        // By the slope, which squares what is missing; by halves where that leads nowhere.
        double step = (sum.all - (double)p.count) / sum.steep;
        next = middle + step;
        bool straight = sum.steep > STEEP && next > low && next < high;
        near = sum.steep > STEEP && fabs(step) < LITTLE;
        if (near) middle = next;
        if (!straight) next = (low + high) / 2.0;
    }
    double steep = 0.0;
    for (int i = me; i < p.scores; i += THREADS) {
        double soft = 1.0 / (1.0 + exp(middle - (logits[i] - centre)));
        shares[i] = soft * (1.0 - soft);
        steep += shares[i];
    }
    double all = sum_of_block(Sums{steep, 0.0}, sums).all;
    if (all < 1e-300) all = 1e-300;  // NaN stays
    for (int i = me; i < p.scores; i += THREADS) shares[i] /= all;
    if (me == 0) p.centres[blockIdx.x] = centre, p.thresholds[blockIdx.x] = middle;
}
