// Floats of a buffer, one, two or four at a time: LOAD4(b, i) are those from 4 i on. Needs pairs.glsl.
// FETCHED   b is a samplerBuffer of such texels, which software renderers fetch in a third of the time; else it is an array
//           of float, TWO_FLOATS and FOUR_FLOATS
#ifdef FETCHED
#define LOAD1(b, i) texelFetch(b, i).x
#define LOAD2(b, i) texelFetch(b, i).xy
#define LOAD4(b, i) texelFetch(b, i)
#else
#define LOAD1(b, i) b[i]
#define LOAD2(b, i) two_of(b[i])
#define LOAD4(b, i) four_of(b[i])
#endif
