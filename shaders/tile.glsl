// Four neighbours of a row at once.
// ALIGNED   rows are whole groups of four, and begin at one in their buffers: loads and stores are of groups
// HALF      with ALIGNED: what is made is fp16
// FETCHED   loads.glsl: sources are buffer textures
// `at` is the index of the first of the four; x where it is in a row, width the row's length.
#include "halves.glsl"
#include "pairs.glsl"
#include "loads.glsl"

#ifdef ALIGNED
#define READ FOUR_FLOATS
#define LOAD(source, at, x, width) LOAD4(source, (at) >> 2)
#ifdef HALF
#define MADE TWO_WORDS
#define STORE(target, at, x, width, four) { \
    vec4 v_ = four; \
    target[(at) >> 2] = as_words(pack_halves(v_.xy), pack_halves(v_.zw)); }
#else
#define MADE FOUR_FLOATS
#define STORE(target, at, x, width, four) target[(at) >> 2] = as_four(four);
#endif
#else
#define READ float
#define LOAD(source, at, x, width) vec4(LOAD1(source, at), LOAD1(source, (at) + min(1, (width) - 1 - (x))), \
    LOAD1(source, (at) + min(2, (width) - 1 - (x))), LOAD1(source, (at) + min(3, (width) - 1 - (x))))
#define MADE float
#define STORE(target, at, x, width, four) { \
    vec4 v_ = four; \
    target[at] = v_.x; \
    if ((x) + 1 < (width)) target[(at) + 1] = v_.y; \
    if ((x) + 2 < (width)) target[(at) + 2] = v_.z; \
    if ((x) + 3 < (width)) target[(at) + 3] = v_.w; }
#endif
