// The sites of a spiral about each peak of relevance, from the peak to the border of its Voronoi cell: a block for each
// peak of each image. Defined is GOLDEN, ARCHIMEDEAN, FIBONACCI or WHIRLWIND.
#include "select.cuh"

// As allocate/peak_cells.py, spiral.py and whirlwind.py have them.
#define RAYS 128
#define STEPS 64
#define MARGIN (1.0 - 1e-5)
#define SPARE_FACTOR 1.25
#define SPARE 16
#define TAU 6.283185307179586
#define GOLDEN_ANGLE 2.399963229728653
#define PITCH 0.30634896253003313  // d ln r / d angle of the golden spiral
#define ACROSS 1.8404221812715489  // TAU sin(atan(PITCH)), from arm to arm if there is one, in units of the radius

// So many of the densities at which sites enter have room; others are computed whenever they are wanted.
#ifdef WHIRLWIND
#define KEPT 768
#else
#define KEPT 4096
#endif

struct Spirals {
    const float* points;      // [images, peaks, 2], x and y in (0, 1)
    const long long* counts;  // [images, peaks], the sites of each: `budget` all together
    const double* weight;     // [images, peaks], what the cells hold of `amounts`
    const float* amounts;     // [images, rows, columns], the relevance of level-0 patches
    double* sites;            // [images, budget, 3]: x, y, level; from peak to peak, and from each one outward
    double box_x, box_y;      // (width, height) in units of the longer side
    double part_x, part_y;    // of the grid, which may reach over the far edges
    double patch;             // its side in units of the longer side
    float floor;              // added to relevance, in units of its mean
    int peaks, budget, rows, columns;
};

struct Cell {
    const float* points;  // of all peaks
    int peaks;
    double box_x, box_y;
    double x, y;  // of its own peak, as those
};

struct Way {
    double x, y;   // of length 1
    double reach;  // how far the cell does
};

// Borders are the image's edges, and half-way to the other peaks. The nearest is that of the least quotient far / fast:
// divided once.
__device__ __forceinline__ Way way_at(const Cell& cell, double angle) {
    Way way;
    sincos(angle, &way.y, &way.x);
    double far = (way.x > 0.0 ? 1.0 - cell.x : cell.x) * cell.box_x, fast = fabs(way.x);
    double down = (way.y > 0.0 ? 1.0 - cell.y : cell.y) * cell.box_y, sinks = fabs(way.y);
    if (down * fast < far * sinks) far = down, fast = sinks;
    for (int other = 0; other < cell.peaks; ++other) {
        double dx = ((double)cell.points[2 * other] - cell.x) * cell.box_x;
        double dy = ((double)cell.points[2 * other + 1] - cell.y) * cell.box_y;
        double half = (dx * dx + dy * dy) / 2.0, towards = way.x * dx + way.y * dy;
        // One that stands in the same place, or is the same, is at 0 and sets no border; nor does one that is behind.
        if (half * fast < far * towards) far = half, fast = towards;
    }
    way.reach = far / fast * MARGIN;
    return way;
}

// Of a site: where it turns to, and the law's number of sites nearer to the peak; of a golden spiral its radius, the
// first one's being 1.
struct Turn {
    double angle, within;
};

struct Placed {
    double radius, spacing;
};

#ifdef GOLDEN
struct Law {
    double growth, turn, step;
};
__device__ __forceinline__ Turn turn_of(const Law& law, int site) {
    return {(double)site * law.turn, exp((double)site * law.growth)};  // infinite is far outside
}
__device__ __forceinline__ double entered(const Law&, int site, const Turn& turn, double reach) {
    return site > 0 ? turn.within / reach : 0.0;
}
__device__ __forceinline__ Placed placed(const Law& law, int site, const Turn& turn, double, double density) {
    double radius = turn.within / density;
    return {site > 0 ? radius : 0.0, law.step * radius};
}
#else
// Of an areal density: within r there are density r^2 / 2 sites, and the first is at the centre.
__device__ __forceinline__ Turn sunflower(int site) {
    return {(double)site * GOLDEN_ANGLE, site > 0 ? (double)site + 0.5 : 0.0};
}
#endif

#if defined(ARCHIMEDEAN) || defined(FIBONACCI)
struct Law {};
__device__ __forceinline__ Turn turn_of(const Law&, int site) {
    Turn turn = sunflower(site);
#ifdef ARCHIMEDEAN
    double length = TAU * turn.within;
    turn.angle = sqrt(2.0 * length);
    for (int i = 0; i < 5; ++i) {  // Newton, of the length of the arm; then only rounding changes
        double slope = sqrt(1.0 + turn.angle * turn.angle);
        turn.angle -= ((turn.angle * slope + asinh(turn.angle)) / 2.0 - length) / slope;
    }
    turn.within = turn.angle * turn.angle / (2.0 * TAU);
#endif
    return turn;
}
__device__ __forceinline__ double entered(const Law&, int, const Turn& turn, double reach) {
    return 2.0 * turn.within / (reach * reach);
}
__device__ __forceinline__ Placed placed(const Law&, int, const Turn& turn, double, double density) {
    return {sqrt(2.0 * turn.within / density), sqrt(TAU / density)};
}
#endif

#ifdef WHIRLWIND
#define PITCH_OF_RAYS (STEPS + 1)  // in shared memory, where threads read from as many rays at once

struct Law {
    const float* density;  // [RAYS, PITCH_OF_RAYS], in the middle of each step
    const double* mass;    // [RAYS], its integral if the ray's reach is 1
};
// Of a step, which ends at ((step + 1) / STEPS)^2 of the area.
__device__ __forceinline__ double mass_in(const float* ray, int step) {
    return (double)ray[step] * (double)(2 * step + 1) / (2.0 * STEPS * STEPS);
}
__device__ __forceinline__ int ray_at(double angle) {
    double turns = angle / TAU;
    return min((int)((turns - floor(turns)) * RAYS), RAYS - 1);
}
__device__ __forceinline__ Turn turn_of(const Law&, int site) { return sunflower(site); }
__device__ __forceinline__ double entered(const Law& law, int, const Turn& turn, double reach) {
    return turn.within / (law.mass[ray_at(turn.angle)] * reach * reach);
}
__device__ __forceinline__ Placed placed(const Law& law, int, const Turn& turn, double reach, double density) {
    int number = ray_at(turn.angle), step = 0;
    const float* ray = law.density + number * PITCH_OF_RAYS;
    double mass = turn.within / (density * reach * reach), begin = 0.0, end = mass_in(ray, 0);
    while (step < STEPS - 1 && end < mass) begin = end, end += mass_in(ray, ++step);
    double along = fmin(fmax((mass - begin) / (end - begin), 0.0), 1.0);
    double area = ((double)(step * step) + along * (double)(2 * step + 1)) / (STEPS * STEPS);
    return {sqrt(area) * reach, sqrt(TAU / (density * (double)ray[step]))};
}

// Between the centres of level-0 patches bilinear, beyond them as at the nearest; x and y from -1 to 1.
__device__ __forceinline__ float relevance_at(const Spirals& p, const float* amounts, float x, float y) {
    x = fminf(fmaxf((x + 1.0f) * (0.5f * (float)p.columns) - 0.5f, 0.0f), (float)(p.columns - 1));
    y = fminf(fmaxf((y + 1.0f) * (0.5f * (float)p.rows) - 0.5f, 0.0f), (float)(p.rows - 1));
    int left = (int)x, right = min(left + 1, p.columns - 1), low = (int)y, high = min(low + 1, p.rows - 1);
    float right_of = x - (float)left, below = y - (float)low;
    const float *upper = amounts + low * p.columns, *lower = amounts + high * p.columns;
    return (upper[left] * (1.0f - right_of) + upper[right] * right_of) * (1.0f - below) +
           (lower[left] * (1.0f - right_of) + lower[right] * right_of) * below;
}
#endif

// The density from which on a site is inside the cell. Inlined here and there, it might be rounded otherwise, and a
// site be counted that is not found again.
__device__ __noinline__ double entering(const Cell& cell, const Law& law, int site) {
    Turn turn = turn_of(law, site);
    return entered(law, site, turn, way_at(cell, turn.angle).reach);
}

struct Entering {
    const Cell& cell;
    const Law& law;
    const double* kept;

    __device__ __forceinline__ double operator()(int site) const {
        return site < KEPT ? kept[site] : entering(cell, law, site);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) spirals(const Spirals p) {
    __shared__ double sums[THREADS], kept[KEPT];
    __shared__ int wholes[THREADS];
    __shared__ Selecting selecting;
    int me = (int)threadIdx.x;
    unsigned image = blockIdx.x / (unsigned)p.peaks, peak = blockIdx.x - image * (unsigned)p.peaks;
    unsigned long long first = (unsigned long long)image * (unsigned)p.peaks;
    const long long* counts = p.counts + first;
    int count = min((int)counts[peak], p.budget), before = 0;
    if (count <= 0) return;
    for (unsigned other = threadIdx.x; other < peak; other += THREADS) before += (int)counts[other];
    before = sum_of_block(before, wholes);
    const float* points = p.points + 2ull * first;
    Cell cell = {points, p.peaks, p.box_x, p.box_y, (double)points[2 * peak], (double)points[2 * peak + 1]};

    // How much of the law there is to the border along each ray: some directions need more sites to be looked at.
    bool is_ray = me < RAYS;
    Way ray = {};
    if (is_ray) ray = way_at(cell, ((double)me + 0.5) * (TAU / RAYS));
    double mass = 0.0;
#if defined(GOLDEN)
    double mean_log = sum_of_block(is_ray ? log(ray.reach) : 0.0, sums) / RAYS;
    double inner = fmin(exp(mean_log) / 4.0, p.patch);
    if (is_ray) mass = fmax(log(ray.reach / inner), 0.0);
#elif defined(WHIRLWIND)
    __shared__ float density[RAYS * PITCH_OF_RAYS], step_x[RAYS], step_y[RAYS];
    __shared__ double masses[RAYS];
    double weight = 0.0;
    for (int other = me; other < p.peaks; other += THREADS) weight += p.weight[first + other];
    float mean = (float)(sum_of_block(weight, sums) / ((double)p.rows * (double)p.columns));
    if (is_ray) {
        step_x[me] = (float)(2.0 * p.part_x / p.box_x * ray.x * ray.reach);
        step_y[me] = (float)(2.0 * p.part_y / p.box_y * ray.y * ray.reach);
    }
    __syncthreads();
    float x = (float)(2.0 * p.part_x * cell.x - 1.0);
    float y = (float)(2.0 * p.part_y * cell.y - 1.0);
    const float* amounts = p.amounts + (unsigned long long)image * (unsigned)(p.rows * p.columns);
    for (int i = me; i < RAYS * STEPS; i += THREADS) {
        int number = i / STEPS, step = i - number * STEPS;
        float along = ((float)step + 0.5f) / STEPS;
        // As torch computes it, which is not contracted: a peak may be as steep as the map is wide.
        float at = relevance_at(p, amounts, __fadd_rn(__fmul_rn(step_x[number], along), x),
                                __fadd_rn(__fmul_rn(step_y[number], along), y));
        density[number * PITCH_OF_RAYS + step] = __fdiv_rn(at, mean) + p.floor;
    }
    __syncthreads();
    if (is_ray) {
        for (int step = 0; step < STEPS; ++step) mass += mass_in(density + me * PITCH_OF_RAYS, step);
        masses[me] = mass;
        mass *= ray.reach * ray.reach;
    }
#else
    mass = ray.reach * ray.reach / 2.0;
#endif
    double mean_mass = sum_of_block(mass, sums) / RAYS;
    double ratio = fmin(highest_of_block(mass, sums) / mean_mass, (double)RAYS);  // also if it is no number
    int looked = (int)ceil(ratio * SPARE_FACTOR * (double)count) + SPARE;
#if defined(GOLDEN)
    double growth = mean_mass / (double)count, step = sqrt(TAU * growth);
    Law law = {growth, growth / PITCH + TAU / fmax(rint(ACROSS / step), 1.0), step};
#elif defined(WHIRLWIND)
    Law law = {density, masses};
#else
    Law law;
#endif

    // The density at which the share is inside is between the one from which the last is, and the next.
    for (int site = me; site < min(looked, KEPT); site += THREADS) kept[site] = entering(cell, law, site);
    Entering enters = {cell, law, kept};
    Smallest last = smallest_of_block(enters, looked, count, selecting);
    double scale = (last.kth + last.next) / 2.0;

    // Each thread puts some that follow each other in their places.
    int each = (looked + THREADS - 1) / THREADS, begin = min(me * each, looked), end = min(begin + each, looked);
    int inside = 0, equal = 0;
    for (int site = begin; site < end; ++site) {
        double from = enters(site);
        inside += from < last.kth, equal += from == last.kth;
    }
    equal = sum_before_in_block(equal, wholes);
    inside = sum_before_in_block(inside, wholes);
    double* sites = p.sites + 3ull * image * (unsigned)p.budget;
    for (int site = begin; site < end; ++site) {
        double from = enters(site);
        unsigned row = (unsigned)before + (unsigned)inside + (unsigned)min(equal, last.ties);
        inside += from < last.kth;
        bool taken = from < last.kth || (from == last.kth && equal++ < last.ties);
        if (!taken || row >= (unsigned)p.budget) continue;  // counts of what is no number sum to anything
        Turn turn = turn_of(law, site);
        Way way = way_at(cell, turn.angle);
        Placed place = placed(law, site, turn, way.reach, scale);
        sites[3 * row] = cell.x + place.radius * way.x / p.box_x;
        sites[3 * row + 1] = cell.y + place.radius * way.y / p.box_y;
        sites[3 * row + 2] = fmax(log2(place.spacing / p.patch), 0.0);
    }
}
