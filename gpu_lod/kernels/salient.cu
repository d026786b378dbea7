// How much the pixels of each patch stand out: the mean, or the most, of differences between levels 1 and 3, 2 and 4, 3
// and 5 of a Gaussian pyramid. A block makes patches that stand side by side, a thread a column of one: what it reads
// along a line serves all pixels below, up to the next sample. Patches wider than a block are made piece by piece.
#include "block.cuh"

#define CHUNK 32  // rows that a block makes at once, from a multiple of it on
#define PAIRS 3
// Samples of the centre that pixels of a chunk are read between.
#define LINE(pair) ((THREADS >> ((pair) + 1)) + 2)
#define LINES(pair) ((CHUNK >> ((pair) + 1)) + 1)
#define BEFORE(pair) ((pair) > 0 ? LINE(0) * LINES(0) + ((pair) > 1 ? LINE(1) * LINES(1) : 0) : 0)  // of other pairs

struct Salient {
    const float* level[PAIRS + 2];  // 1 to 5, [layers, h, w]; samples stand 2^level pixels apart
    float* target;                  // [layers, rows, columns]
    int height, width, layers, rows, columns;
    int across;       // patches of a block
    int patch, most;  // most: of the pixels, else the mean
};

__device__ __forceinline__ int samples_of(int n, int level) { return (n + (1 << level) - 1) >> level; }

__device__ __forceinline__ float between(float a, float b, float share) { return a + (b - a) * share; }

// The centre less the surround, at samples of `count` rows of the centre; beyond the last one the last is read.
template <int pair>
__device__ __forceinline__ void differences(const Salient& p, int layer, int row, int count, int column, float* into) {
    int h = samples_of(p.height, pair + 1), w = samples_of(p.width, pair + 1);
    int far_h = samples_of(p.height, pair + 3), far_w = samples_of(p.width, pair + 3);
    const float* centre = p.level[pair] + (unsigned long long)layer * ((unsigned long long)h * w);
    const float* surround = p.level[pair + 2] + (unsigned long long)layer * ((unsigned long long)far_h * far_w);
    for (int i = (int)threadIdx.x; i < count * LINE(pair); i += (int)blockDim.x) {
        int line = i / LINE(pair), y = min(row + line, h - 1), x = min(column + i - line * LINE(pair), w - 1);
        int far_y = y >> 2, far_x = x >> 2, right = min(far_x + 1, far_w - 1) - far_x;
        const float* upper = surround + ((unsigned long long)(unsigned)far_y * (unsigned)far_w + (unsigned)far_x);
        const float* lower = upper + (far_y + 1 < far_h ? far_w : 0);
        float along = 0.25f * (float)(x & 3), down = 0.25f * (float)(y & 3);
        float around = between(between(upper[0], upper[right], along), between(lower[0], lower[right], along), down);
        into[i] = centre[(unsigned long long)(unsigned)y * (unsigned)w + (unsigned)x] - around;
    }
}

// A column of differences between samples, on each of the lines that eight rows are read between.
template <int pair> struct Column {
    const float* at;
    float along;
    // Of a chunk whose samples begin at this column.
    __device__ __forceinline__ Column(const float* samples, int begin, int column) {
        constexpr int level = pair + 1;
        at = samples + BEFORE(pair) + (column >> level) - (begin >> level);
        along = (float)(column & ((1 << level) - 1)) * (1.0f / (float)(1 << level));
    }
    __device__ __forceinline__ void read(int row, float* lines) const {
#pragma unroll
        for (int i = 0; i <= 8 >> (pair + 1); ++i) {
            const float* two = at + ((row >> (pair + 1)) + i) * LINE(pair);
            lines[i] = between(two[0], two[1], along);
        }
    }
};
template <int pair> __device__ __forceinline__ float size_at(const float* lines, int row) {
    constexpr int level = pair + 1;
    int line = row >> level, within = row & ((1 << level) - 1);
    return fabsf(between(lines[line], lines[line + 1], (float)within * (1.0f / (float)(1 << level))));
}

extern "C" __global__ void __launch_bounds__(THREADS) salient(const Salient p) {
    __shared__ float samples[BEFORE(2) + LINE(2) * LINES(2)], all[THREADS];
    int tall = min(p.patch, p.height), wide = min(p.patch, p.width), me = (int)threadIdx.x;
    int own = (int)((unsigned)me / (unsigned)wide), column = me - own * wide, first = (int)blockIdx.x * p.across;
    bool mine = own < p.across && first + own < p.columns;
    // Flush with the far edges.
    int begin = min(first * p.patch, p.width - wide);
    int left = mine ? min((first + own) * p.patch, p.width - wide) : begin;
    for (int layer = (int)blockIdx.z; layer < p.layers; layer += (int)gridDim.z) {
        for (int row = (int)blockIdx.y; row < p.rows; row += (int)gridDim.y) {
            int top = min(row * p.patch, p.height - tall), bottom = top + tall;
            float found = 0.0f;
            for (int x = 0; x < wide; x += THREADS) {
                int at = left + x + column;
                Column<0> fine(samples, begin + x, at);
                Column<1> middle(samples, begin + x, at);
                Column<2> coarse(samples, begin + x, at);
                for (int base = top & -CHUNK; base < bottom; base += CHUNK) {
                    int from = max(top, base) - base, to = min(bottom - base, CHUNK);
#define DIFFERENCES(pair)                                                                                           \
    differences<pair>(p, layer, (base + from) >> (pair + 1), ((to - 1) >> (pair + 1)) + 2 - (from >> (pair + 1)),   \
                      (begin + x) >> (pair + 1), samples + BEFORE(pair) + (from >> (pair + 1)) * LINE(pair))
                    DIFFERENCES(0);
                    DIFFERENCES(1);
                    DIFFERENCES(2);
                    __syncthreads();
                    if (mine && x + column < wide) {
#pragma unroll 1
                        for (int y = from & -8; y < to; y += 8) {
                            float a[5], b[3], c[2];
                            fine.read(y, a), middle.read(y, b), coarse.read(y, c);
#pragma unroll
                            for (int i = 0; i < 8; ++i) {
                                if (y + i < from || y + i >= to) continue;
                                float total = size_at<0>(a, i) + size_at<1>(b, i) + size_at<2>(c, i);
                                found = p.most ? higher(found, total) : found + total;
                            }
                        }
                    }
                    __syncthreads();
                }
            }
            // Of all columns of a patch, which are threads side by side.
            all[me] = found;
            __syncthreads();
            int columns = min(wide, THREADS), step = 1;
            while (2 * step < columns) step *= 2;
            for (; step > 0; step /= 2) {
                if (mine && column < step && column + step < columns)
                    all[me] = p.most ? higher(all[me], all[me + step]) : all[me] + all[me + step];
                __syncthreads();
            }
            if (mine && column == 0)
                p.target[((unsigned long long)layer * p.rows + row) * p.columns + first + own] =
                    all[me] / (p.most ? (float)PAIRS : (float)PAIRS * (float)tall * (float)wide);
        }
    }
}
