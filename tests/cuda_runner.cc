// The threads of a block, and the blocks of a launch: see cuda_shim.h. Compiled once, and linked to every kernel.
#include "cuda_shim.h"

#include <setjmp.h>
#include <stdio.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#pragma GCC visibility push(hidden)

Index threadIdx, blockIdx, blockDim, gridDim;
static char wrong[200];  // the first thing that went wrong

// -- the threads of a block -------------------------------------------------------------------------------------------

static const size_t STACK = 1 << 16;

// They last from block to block and from launch to launch. A context only starts one: swapcontext asks the kernel for the
// signal mask each time, which takes longer than all that most threads do.
struct Fiber {
    ucontext_t start;
    std::unique_ptr<char[]> stack;  // untouched, but where it is used
    jmp_buf here;
    bool started;
    bool done;
    int line;     // of the barrier that it waits at, or was last at
    bool fenced;  // since that barrier
    bool paused;  // before an atomic operation, while others go on
};

static Fiber fibers[1024];  // the most that a block has
static jmp_buf scheduler;
static int running;
static std::mt19937* pauses;  // whether threads pause, and which; null: none does

void complain(const char* what, int line) {
    if (!wrong[0]) snprintf(wrong, sizeof wrong, "%s (line %d), block %u, thread %d", what, line, blockIdx.x, running);
}

// What -fsanitize calls, in place of its own library: GCC and Clang pass where it was met, {file, line, column}, first.
static int line_of(void* met) { return *(int*)((char*)met + sizeof(char*)); }

extern "C" {
void __ubsan_handle_type_mismatch_v1(void* met, void*) {
    complain("memory is read or written where nothing of its type may begin", line_of(met));
}
void __ubsan_handle_out_of_bounds(void* met, void*) { complain("an array ends before what is read or written", line_of(met)); }
void __ubsan_handle_shift_out_of_bounds(void* met, void*, void*) {
    complain("a number has fewer bits than it is shifted by", line_of(met));
}
void __ubsan_handle_float_cast_overflow(void* met, void*) { complain("no int is as large", line_of(met)); }
void __ubsan_handle_add_overflow(void* met, void*, void*) { complain("a sum is no int", line_of(met)); }
void __ubsan_handle_sub_overflow(void* met, void*, void*) { complain("a difference is no int", line_of(met)); }
void __ubsan_handle_mul_overflow(void* met, void*, void*) { complain("a product is no int", line_of(met)); }
void __ubsan_handle_negate_overflow(void* met, void*) { complain("a negative is no int", line_of(met)); }
void __ubsan_handle_divrem_overflow(void* met, void*, void*) { complain("a quotient is no int", line_of(met)); }  // and dies
}

static void suspend() {
    if (!_setjmp(fibers[running].here)) _longjmp(scheduler, 1);
}

void wait_at(int line) {
#ifdef NO_BARRIERS
    complain("a barrier in a kernel that is said to have none", line);
#endif
    fibers[running].line = line;
    fibers[running].fenced = false;
    suspend();
}

// What other threads do between a thread's last read and its atomic operation.
static void let_others() {
#ifndef NO_BARRIERS
    if (!pauses || (*pauses)() & 1) return;
    fibers[running].paused = true;
    suspend();
    fibers[running].paused = false;
#endif
}

void __threadfence() { fibers[running].fenced = true; }

extern "C" char __start_shared_memory[] __attribute__((weak));
extern "C" char __stop_shared_memory[] __attribute__((weak));

// What a block shares it counts for itself: other blocks that would read before it is done there are none.
unsigned count_up(unsigned* counter, unsigned by, int line) {
    let_others();
    if ((char*)counter < __start_shared_memory || (char*)counter >= __stop_shared_memory) {
        if (!fibers[running].fenced) complain("a block is counted without a fence", line);
        // Nothing but the fence may stand between: what a thread writes there could come after the count.
        for (unsigned i = 0; i < blockDim.x; ++i)
            if (line - fibers[i].line > 3) complain("a block is counted behind no barrier", line);
    }
    unsigned before = *counter;
    *counter += by;
    return before;
}
// What is an int a block counts in memory that nobody else reads.
int count_up(int* counter, int by, int) {
    let_others();
    int before = *counter;
    *counter += by;
    return before;
}

int atomicMin(int* lowest, int value) {
    let_others();
    int before = *lowest;
    *lowest = min(before, value);
    return before;
}

// -- a launch ---------------------------------------------------------------------------------------------------------

static void (*body)();

static void one_thread() {
    for (;;) {
        body();
        fibers[running].done = true;
        suspend();
    }
}

static void resume(int thread) {
    Fiber& fiber = fibers[thread];
    running = thread;
    threadIdx = {(unsigned)thread, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    if (!fiber.stack) fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, one_thread, 0);
    setcontext(&fiber.start);
}

static void run_block(int threads, int order, std::mt19937& random) {
    if (__start_shared_memory) memset(__start_shared_memory, 0xcd, __stop_shared_memory - __start_shared_memory);
#ifdef NO_BARRIERS
    for (int i = 0; i < threads; ++i) {
        running = i;
        threadIdx = {(unsigned)i, 0, 0};
        body();
    }
    return;
#endif
    std::vector<int> turn(threads);
    for (int i = 0; i < threads; ++i) {
        turn[i] = order == 1 ? threads - 1 - i : i;
        fibers[i].done = fibers[i].fenced = fibers[i].paused = false;
        fibers[i].line = 0;
    }
    for (bool alive = true; alive && !wrong[0];) {
        if (order == 2) std::shuffle(turn.begin(), turn.end(), random);
        alive = false;
        int line = 0, ended = 0;
        std::vector<int> waiting = turn;  // to run on to the next barrier
        for (size_t next = 0; next < waiting.size(); ++next) {
            int i = waiting[next];
            if (fibers[i].done) continue;
            resume(i);
            if (fibers[i].paused) {
                waiting.push_back(i);
                continue;
            }
            if (fibers[i].done) {
                ++ended;
                continue;
            }
            alive = true;
            if (line && line != fibers[i].line) complain("threads wait at different barriers", fibers[i].line);
            line = fibers[i].line;
        }
        if (alive && ended) complain("threads end where others wait at a barrier", line);
    }
    if (wrong[0])  // some have not ended, and never will
        for (Fiber& fiber : fibers) fiber.started = false;
}

// order: of threads, 0 ascending, 1 descending, 2 shuffled anew at each barrier; blocks are shuffled unless seed is 0.
const char* run_grid(void (*kernel)(), Index grid, int threads, int order, unsigned seed) {
    body = kernel;
    wrong[0] = 0;
    gridDim = grid;
    blockDim = {(unsigned)threads, 1, 1};
    std::mt19937 random(seed);
    pauses = order == 2 ? &random : nullptr;
    std::vector<unsigned> blocks(grid.x);
    for (unsigned i = 0; i < grid.x; ++i) blocks[i] = i;
    if (seed) std::shuffle(blocks.begin(), blocks.end(), random);
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x : blocks) {
                blockIdx = {x, y, z};
                run_block(threads, order, random);
                if (wrong[0]) return wrong;
            }
    return nullptr;
}

#pragma GCC visibility pop
