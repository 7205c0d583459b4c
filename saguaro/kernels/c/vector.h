/* Vectors of eight numbers. Intrinsics have a fallback in plain C for other machines. */

#ifdef __AVX__
#include <immintrin.h>
#endif

typedef float f8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4)));
typedef int16_t h8 __attribute__((vector_size(16), aligned(2)));
typedef int16_t h16 __attribute__((vector_size(32), aligned(2)));
typedef int8_t b8 __attribute__((vector_size(8), aligned(1)));
typedef int8_t b16 __attribute__((vector_size(16), aligned(1)));

/* Shuffle the lanes of two vectors; those of the second are 8 to 15. */
#ifdef __clang__
#define LANES(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif
/* Keep a vector in a register: gcc would reload it for every use. */
#ifdef __AVX__
#define KEEP(v) __asm__("" : "+x"(v))
#else
#define KEEP(v)
#endif
/* For functions whose number of rows or heads is a constant at the call, so that sums stay in registers. */
#define UNROLLED static inline __attribute__((always_inline))

static inline float sum8(f8 v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

static inline f8 splat(float x) { return (f8){x, x, x, x, x, x, x, x}; }

/* a * b + c, always fused if the machine has FMA. With -ffp-contract the compiler's choice could depend on the number
   of rows. */
static inline f8 fma8(f8 a, f8 b, f8 c) {
#ifdef __FMA__
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline f8 larger(f8 a, f8 b) {
    i8 is_more = a > b;
    return (f8)((is_more & (i8)a) | (~is_more & (i8)b));
}

static inline f8 smaller(f8 a, f8 b) { return -larger(-a, -b); }

static inline float largest(f8 v) {
    float most = v[0];
    for (int i = 1; i < 8; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x within 2 units in the last place; x is clamped to -87 .. 88; NaN for NaN */
static inline f8 exp8(f8 x) {
    f8 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    x = smaller(splat(88.0f), larger(splat(-87.0f), x));
    f8 whole = fma8(x, splat(1.44269504f), magic);
    i8 n = (i8)whole - (i8)magic;
    whole -= magic;
    f8 r = fma8(whole, splat(2.12194440e-4f), fma8(whole, splat(-0.693359375f), x));
    f8 p = fma8(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma8(p, r, splat(8.3334519073e-3f));
    p = fma8(p, r, splat(4.1665795894e-2f));
    p = fma8(p, r, splat(1.6666665459e-1f));
    p = fma8(p, r, splat(5.0000001201e-1f));
    p = fma8(p * r, r, r) + splat(1.0f);
    return p * (f8)((n + 127) << 23);
}
