// The threshold of a soft top-k, by bisection, and each score's share in it: a block for each row of scores.
#include "block.cuh"

#define FAR 300.0  // so far beyond all thresholds that nothing is left of a sigmoid, and its exponential is a number

struct Threshold {
    const double* logits;  // [rows, scores], about the middle between the last that counts and the next
    const double* gaps;    // [rows], from there to either
    double* thresholds;    // [rows]
    double* shares;        // [rows, scores]: by how much each moves the threshold
    double tail;           // beyond it all sigmoids together are nothing
    int scores, count, halvings;
};

extern "C" __global__ void __launch_bounds__(THREADS) threshold(const Threshold p) {
    __shared__ double sums[THREADS];
    unsigned long long first = (unsigned long long)blockIdx.x * p.scores;
    const double* logits = p.logits + first;
    double *shares = p.shares + first, gap = p.gaps[blockIdx.x];
    double high = gap > p.tail ? 0.0 : gap + p.tail, low = -high, middle = 0.0;
    // sigmoid(x - t) is e^x / (e^x + e^t): one exponential a turn, not one a score. Until the end shares hold e^x.
    for (int i = (int)threadIdx.x; i < p.scores; i += THREADS) shares[i] = exp(fmin(fmax(logits[i], -FAR), FAR));
    for (int turn = 0; turn < p.halvings; ++turn) {
        middle = (low + high) / 2.0;
        double base = exp(middle), sum = 0.0;
        for (int i = (int)threadIdx.x; i < p.scores; i += THREADS) sum += shares[i] / (shares[i] + base);
        bool more = sum_of_block(sum, sums) > (double)p.count;
        low = more ? middle : low;
        high = more ? high : middle;
    }
    double steep = 0.0;
    for (int i = (int)threadIdx.x; i < p.scores; i += THREADS) {
        double soft = 1.0 / (1.0 + exp(middle - logits[i]));
        shares[i] = soft * (1.0 - soft);
        steep += shares[i];
    }
    double all = sum_of_block(steep, sums);
    if (all < 1e-300) all = 1e-300;  // NaN stays
    for (int i = (int)threadIdx.x; i < p.scores; i += THREADS) shares[i] /= all;
    if (threadIdx.x == 0) p.thresholds[blockIdx.x] = middle;
}
