/* Products, attention and sampling on a CPU, with weights in float32 or int8.

   Invariant: a row's (token's) result depends only on that row, bit for bit: every number is computed by the same
   instructions in the same order for any number of rows. Rows are contiguous. Callers have checked shapes; all sizes
   are numbers of elements. Intrinsics have a fallback in plain C for other machines.

   In int8 an input row has one scale, and a weight has one scale per output. Before rounding, both are multiplied by a
   Hadamard matrix over blocks of `mixed` inputs. This leaves their product unchanged and spreads outliers, which would
   otherwise dominate the scale. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif
#include "team.h"

#define STEPS 127.0f
#define LEAST 1e-30f /* lower bound of a row's largest value */
#define SMALL 65536  /* weights; fewer run on one thread */
#define MANY 16      /* rows; fewer run on one thread */

typedef float f8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4)));
typedef int16_t h8 __attribute__((vector_size(16), aligned(2)));
typedef int16_t h16 __attribute__((vector_size(32), aligned(2)));
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

/* ---- rounding ---- */

static inline f8 flip(f8 v, i8 signs) { return (f8)((i8)v ^ signs); }

/* Multiply a row by a Hadamard matrix of 1 and -1 over blocks of `mixed`; the factor 1 / sqrt(mixed) is not applied. */
static void turn(float *x, int n, int mixed) {
    const int32_t less = INT32_MIN; /* a minus sign */
    int half = 1;
    if (mixed >= 8) {
        for (int i = 0; i < n; i += 8) {
            f8 v = *(f8 *)(x + i);
            v = LANES(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + flip(v, (i8){0, less, 0, less, 0, less, 0, less});
            v = LANES(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + flip(v, (i8){0, 0, less, less, 0, 0, less, less});
            v = LANES(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + flip(v, (i8){0, 0, 0, 0, less, less, less, less});
            *(f8 *)(x + i) = v;
        }
        for (half = 8; half < mixed; half *= 2)
            for (int i = 0; i < n; i += 2 * half)
                for (int j = i; j < i + half; j += 8) {
                    f8 a = *(f8 *)(x + j), b = *(f8 *)(x + j + half);
                    *(f8 *)(x + j) = a + b;
                    *(f8 *)(x + j + half) = a - b;
                }
    }
    for (; half < mixed; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
}

/* Quantise one row of n, in a buffer of `width` (a multiple of 8): q gets n values, then zeros. Returns the scale. */
static float round_row(float *x, int n, int width, int16_t *q) {
    f8 most = splat(LEAST), magic = splat(12582912.0f); /* see exp8 */
    i8 is_odd = {0};
    memset(x + n, 0, (width - n) * sizeof(float));
    for (int i = 0; i < width; i += 8) {
        f8 size = (f8)(*(i8 *)(x + i) & INT32_MAX);
        is_odd |= ~(size <= splat(FLT_MAX));
        most = larger(size, most);
    }
    float top = largest(most);
    f8 to_steps = splat(STEPS / top);
    for (int i = 0; i < width; i += 8)
        *(h8 *)(q + i) = __builtin_convertvector((i8)fma8(*(f8 *)(x + i), to_steps, magic) - (i8)magic, h8);
    for (int i = 1; i < 8; i++) is_odd[0] |= is_odd[i];
    return is_odd[0] ? NAN : top / STEPS; /* NaN or inf in the row makes the result NaN */
}

/* Copy a row, after an optional RMSNorm. */
static void norm_row(const float *from, int n, const float *norm, float eps, float *to) {
    if (!norm) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    f8 squares = splat(0.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) squares = fma8(*(const f8 *)(from + i), *(const f8 *)(from + i), squares);
    float sum = sum8(squares);
    for (; i < n; i++) sum += from[i] * from[i];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i < n; i++) to[i] = from[i] * scale * norm[i];
}

/* A matrix [n_out][n_in], int8 if it has scales; see saguaro.kernels.cpu.Matrix. Outputs are in panels of PANEL, inputs
   are padded to width: [panel][width][PANEL] in float32, [panel][width / 2][PANEL][2] in int8. */
typedef struct {
    const void *weights;
    const float *scales; /* [n_out] */
    int32_t n_in, width, mixed, n_out;
} matrix;

/* The input rows of a product: of `width`, in a matrix's format; scales is NULL for float32. */
typedef struct {
    void *values;
    float *scales;
} rows;

/* Convert row `row` of x [row][n] to a matrix's input format, after an optional RMSNorm; room: width floats. */
static void prepare_row(const float *x, int row, int n, int mixed, const float *norm, float eps, int width, rows to,
                        float *room) {
    const float *from = x + (size_t)row * n;
    float *y = to.scales ? room : (float *)to.values + (size_t)row * width;
    norm_row(from, n, norm, eps, y);
    if (to.scales) {
        turn(y, n, mixed);
        to.scales[row] = round_row(y, n, width, (int16_t *)to.values + (size_t)row * width) / sqrtf((float)mixed);
    } else {
        memset(y + n, 0, (width - n) * sizeof(float));
    }
}

typedef struct {
    const float *x, *norm;
    int n_rows, n, mixed, width;
    float eps;
    rows to;
} preparation;

static void prepare_part(const member *m, void *arg) {
    preparation *p = arg;
    int first, last;
    float *room = malloc(p->width * sizeof(float));
    share_of(m, p->n_rows, &first, &last);
    for (int row = first; row < last; row++)
        prepare_row(p->x, row, p->n, p->mixed, p->norm, p->eps, p->width, p->to, room);
    free(room);
}

/* Convert rows of n floats to a matrix's input format, after an optional RMSNorm; scales is NULL for float32. */
void prepare_rows(int n_threads, const float *x, int n_rows, int n, int mixed, const float *norm, float eps, int width,
                  void *values, float *scales) {
    preparation p = {x, norm, n_rows, n, mixed, width, eps, {values, scales}};
    together(n_rows >= MANY ? n_threads : 1, prepare_part, &p);
}

/* ---- products ---- */

#define MOST_ROWS 6 /* rows whose sums fit the registers, with PANEL outputs */
#define PANEL 16
#define BLOCK 64   /* inputs per partial sum: keeps float32 accurate */
#define AHEAD 2048 /* prefetch distance of weights in bytes: a third of the time without prefetch */

static inline h16 widen(const int8_t *w) {
#ifdef __AVX2__
    return (h16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#else
    return __builtin_convertvector(*(const b16 *)w, h16);
#endif
}

/* sum + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1], where all pairs of b are equal */
static inline i8 add_pairs(i8 sum, h16 a, int32_t pair) {
    i8 b = {pair, pair, pair, pair, pair, pair, pair, pair};
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (i8)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVXVNNI__)
    return (i8)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
    return sum + (i8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((i8)a << 16 >> 16) * (b << 16 >> 16) + ((i8)a >> 16) * (b >> 16);
#endif
}

/* R rows times a panel */
UNROLLED void int8_tile(const int R, const int16_t *q, const int8_t *w, int width, i8 sums[][2]) {
    i8 sum[MOST_ROWS][2] = {{{0}}};
    for (int i = 0; i < width; i += 2, w += 2 * PANEL) {
        __builtin_prefetch(w + AHEAD, 0, 0); /* non-temporal: a step reads weights once */
        h16 a = widen(w), b = widen(w + PANEL);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, q + (size_t)r * width + i, sizeof pair);
            sum[r][0] = add_pairs(sum[r][0], a, pair);
            sum[r][1] = add_pairs(sum[r][1], b, pair);
        }
    }
    for (int r = 0; r < R; r++) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
}

UNROLLED void float_tile(const int R, const float *x, const float *w, int width, f8 sums[][2]) {
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(0.0f);
    for (int from = 0; from < width; from += BLOCK) {
        f8 sum[MOST_ROWS][2] = {{{0}}};
        for (int i = from; i < width && i < from + BLOCK; i++, w += PANEL) {
            __builtin_prefetch((const char *)w + AHEAD);
            f8 a = *(const f8 *)w, b = *(const f8 *)(w + 8);
            KEEP(a);
            KEEP(b);
            for (int r = 0; r < R; r++) {
                f8 here = splat(x[(size_t)r * width + i]);
                sum[r][0] = fma8(here, a, sum[r][0]);
                sum[r][1] = fma8(here, b, sum[r][1]);
            }
        }
        for (int r = 0; r < R; r++) sums[r][0] += sum[r][0], sums[r][1] += sum[r][1];
    }
}

#define BY_SIZE(n, tile, ...)                                                                                          \
    switch (n) {                                                                                                       \
    case 1: tile(1, __VA_ARGS__); break;                                                                               \
    case 2: tile(2, __VA_ARGS__); break;                                                                               \
    case 3: tile(3, __VA_ARGS__); break;                                                                               \
    case 4: tile(4, __VA_ARGS__); break;                                                                               \
    case 5: tile(5, __VA_ARGS__); break;                                                                               \
    case 6: tile(6, __VA_ARGS__); break;                                                                               \
    }

static void int8_sums(int n, const int16_t *q, const int8_t *w, int width, const float *scales, const float *w_scales,
                      f8 sums[][2]) {
    i8 whole[MOST_ROWS][2];
    BY_SIZE(n, int8_tile, q, w, width, whole)
    for (int r = 0; r < n; r++)
        for (int c = 0; c < 2; c++)
            sums[r][c] = __builtin_convertvector(whole[r][c], f8) * (splat(scales[r]) * *(const f8 *)(w_scales + 8 * c));
}

static void float_sums(int n, const float *x, const float *w, int width, f8 sums[][2]) {
    BY_SIZE(n, float_tile, x, w, width, sums)
}

/* PANEL outputs from `out` on of y [row][n_out] = x @ W^T + bias + onto; bias and onto may be NULL */
static void read_panel(const matrix *w, rows x, int n_rows, const float *bias, const float *onto, int out, float *y) {
    int n_tiles = (n_rows + MOST_ROWS - 1) / MOST_ROWS, n_out = w->n_out;
    int n_here = n_out - out < PANEL ? n_out - out : PANEL;
    size_t width = w->width;
    float w_scales[PANEL] = {0}, biases[PANEL] = {0};
    if (w->scales) memcpy(w_scales, w->scales + out, n_here * sizeof(float));
    if (bias) memcpy(biases, bias + out, n_here * sizeof(float));
    for (int tile = 0; tile < n_tiles; tile++) {
        size_t first = (size_t)tile * n_rows / n_tiles;
        int n = (size_t)(tile + 1) * n_rows / n_tiles - first;
        f8 sums[MOST_ROWS][2];
        if (w->scales)
            int8_sums(n, (const int16_t *)x.values + first * width, (const int8_t *)w->weights + out * width, width,
                      x.scales + first, w_scales, sums);
        else
            float_sums(n, (const float *)x.values + first * width, (const float *)w->weights + out * width, width, sums);
        for (int r = 0; r < n; r++) {
            size_t to = (first + r) * n_out + out;
            float here[PANEL] = {0};
            if (onto) memcpy(here, onto + to, n_here * sizeof(float));
            for (int c = 0; c < PANEL; c += 8) *(f8 *)(here + c) += sums[r][c / 8] + *(f8 *)(biases + c);
            memcpy(y + to, here, n_here * sizeof(float));
        }
    }
}

typedef struct {
    const matrix *w;
    rows x;
    int n_rows;
    const float *bias, *onto;
    float *y;
} product;

static void read_part(const member *m, void *arg) {
    product *p = arg;
    int first, last;
    share_of(m, (p->w->n_out + PANEL - 1) / PANEL, &first, &last);
    for (int panel = first; panel < last; panel++)
        read_panel(p->w, p->x, p->n_rows, p->bias, p->onto, panel * PANEL, p->y);
}

/* More threads than one only for a product that takes longer than waking them. */
static int threads_for(int n_threads, const matrix *w) { return (size_t)w->width * w->n_out >= SMALL ? n_threads : 1; }

/* y [row][n_out] = x @ W^T + bias + onto, x from prepare_rows; bias and onto may be NULL */
void read_rows(int n_threads, const matrix *w, void *x, float *scales, int n_rows, const float *bias, const float *onto,
               float *y) {
    product p = {w, {x, scales}, n_rows, bias, onto, y};
    together(threads_for(n_threads, w), read_part, &p);
}

/* y = onto + from @ W^T + bias; next: y after RMSNorm, in the input format of the next product */
void write_rows(int n_threads, const matrix *w, const float *from, int n_rows, const float *bias, const float *onto,
                const float *norm, float eps, int mixed, int width, float *y, void *next, float *next_scales) {
    void *x = malloc((size_t)n_rows * w->width * sizeof(float));
    float *scales = w->scales ? malloc(n_rows * sizeof(float)) : NULL;
    prepare_rows(n_threads, from, n_rows, w->n_in, w->mixed, NULL, 0.0f, w->width, x, scales);
    read_rows(n_threads, w, x, scales, n_rows, bias, onto, y);
    prepare_rows(n_threads, y, n_rows, w->n_out, mixed, norm, eps, width, next, next_scales);
    free(x);
    free(scales);
}

/* ---- between products ---- */

static inline f8 silu_times(f8 x, f8 up) { return x / (splat(1.0f) + exp8(-x)) * up; }

/* n values of silu(gate) * up */
static void gate(const float *gates, const float *ups, int n, float *out) {
    int i = 0;
    for (; i + 8 <= n; i += 8) *(f8 *)(out + i) = silu_times(*(const f8 *)(gates + i), *(const f8 *)(ups + i));
    for (; i < n; i++) out[i] = silu_times(splat(gates[i]), splat(ups[i]))[0];
}

/* A product p whose outputs are gates, then ups: p.y [row][n_out] is their room; out [row][n_out / 2] the result. */
typedef struct {
    product p;
    float *out;
} gated_product;

static void gated_part(const member *m, void *arg) {
    gated_product *g = arg;
    product *p = &g->p;
    int n_out = p->w->n_out, n = n_out / 2, first, last;
    if (n % PANEL) { /* a panel may have gates and ups */
        read_part(m, p);
        meet(m);
        share_of(m, p->n_rows, &first, &last);
        for (int row = first; row < last; row++)
            gate(p->y + (size_t)row * n_out, p->y + (size_t)row * n_out + n, n, g->out + (size_t)row * n);
        return;
    }
    share_of(m, n / PANEL, &first, &last);
    for (int panel = first; panel < last; panel++) {
        int out = panel * PANEL;
        read_panel(p->w, p->x, p->n_rows, p->bias, p->onto, out, p->y);
        read_panel(p->w, p->x, p->n_rows, p->bias, p->onto, n + out, p->y);
        for (int row = 0; row < p->n_rows; row++) {
            const float *gates = p->y + (size_t)row * n_out + out;
            gate(gates, gates + n, PANEL, g->out + (size_t)row * n + out);
        }
    }
}

/* y [row][n_out / 2] = silu(gate) * up, where x @ W^T + bias is the gates, then the ups */
void read_gated(int n_threads, const matrix *w, void *x, float *scales, int n_rows, const float *bias, float *y) {
    float *both = malloc((size_t)n_rows * w->n_out * sizeof(float));
    gated_product g = {{w, {x, scales}, n_rows, bias, NULL, both}, y};
    together(threads_for(n_threads, w), gated_part, &g);
    free(both);
}

static void norm_head(float *x, int d, const float *norm, float eps) {
    float sum = 0.0f;
    for (int i = 0; i < d; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)d + eps);
    for (int i = 0; i < d; i++) x[i] *= scale * norm[i];
}

/* A product p whose outputs p.y [row][n_q + 2 n_kv][d] are heads: optional norms of queries and keys, then rope by
   cos and sin [place][d] (sin negative on the first half), a row's place being place[row], or the row itself if that is
   NULL. Keys and values are written to memory [token][2 n_kv][d] at kv_index, unless that is negative. */
typedef struct {
    product p;
    int n_q, n_kv, d;
    const float *q_norm, *k_norm;
    float eps;
    const float *cosines, *sines;
    const int64_t *place, *kv_index;
    float *memory;
} heads_product;

/* Norms, rope and write of one head of all rows. */
static void finish_head(const heads_product *h, int head) {
    int n_all = h->n_q + 2 * h->n_kv, d = h->d, half = d / 2;
    for (int row = 0; row < h->p.n_rows; row++) {
        float *y = h->p.y + ((size_t)row * n_all + head) * d;
        if (head < h->n_q + h->n_kv) {
            size_t at = (size_t)(h->place ? h->place[row] : row) * d;
            const float *c = h->cosines + at, *s = h->sines + at;
            if (h->q_norm) norm_head(y, d, head < h->n_q ? h->q_norm : h->k_norm, h->eps);
            for (int i = 0; i < half; i++) {
                float a = y[i], b = y[i + half];
                y[i] = a * c[i] + b * s[i];
                y[i + half] = b * c[i + half] + a * s[i + half];
            }
        }
        if (head >= h->n_q && h->kv_index[row] >= 0)
            memcpy(h->memory + ((size_t)h->kv_index[row] * 2 * h->n_kv + head - h->n_q) * d, y, d * sizeof(float));
    }
}

static void heads_part(const member *m, void *arg) {
    heads_product *h = arg;
    product *p = &h->p;
    int first, last, is_aligned = h->d % PANEL == 0; /* no panel has outputs of two heads */
    if (!is_aligned) {
        read_part(m, p);
        meet(m);
    }
    share_of(m, h->n_q + 2 * h->n_kv, &first, &last);
    for (int head = first; head < last; head++) {
        for (int out = head * h->d; is_aligned && out < (head + 1) * h->d; out += PANEL)
            read_panel(p->w, p->x, p->n_rows, p->bias, p->onto, out, p->y);
        finish_head(h, head);
    }
}

/* heads [row][n_q + 2 n_kv][d] = x @ W^T + bias, then see heads_product, with cos and sin [row][d] */
void read_heads(int n_threads, const matrix *w, void *x, float *scales, int n_rows, const float *bias, int n_q, int n_kv,
                int d, const float *q_norm, const float *k_norm, float eps, const float *cosines, const float *sines,
                float *memory, const int64_t *kv_index, float *heads) {
    heads_product h = {{w, {x, scales}, n_rows, bias, NULL, heads}, n_q, n_kv, d, q_norm, k_norm, eps,
                       cosines, sines, NULL, kv_index, memory};
    together(threads_for(n_threads, w), heads_part, &h);
}

/* ---- attention ---- */

#define SOON 12 /* prefetch distance in keys */
#define MOST_HEADS 3 /* query heads of one token that share the load of a key; their results are independent */

/* the sums of four vectors, times scale */
static inline void sum_four(f8 a, f8 b, f8 c, f8 e, float scale, float *sums) {
    f8 ab = LANES(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + LANES(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    f8 ce = LANES(c, e, 0, 8, 1, 9, 4, 12, 5, 13) + LANES(c, e, 2, 10, 3, 11, 6, 14, 7, 15);
    f8 halves = LANES(ab, ce, 0, 1, 8, 9, 4, 5, 12, 13) + LANES(ab, ce, 2, 3, 10, 11, 6, 7, 14, 15);
    halves = (halves + LANES(halves, halves, 4, 5, 6, 7, 0, 1, 2, 3)) * splat(scale);
    memcpy(sums, &halves, 4 * sizeof(float));
}

/* scores [H][room] of H heads q [H][d] with each key, then -inf up to a multiple of 8 */
UNROLLED void score(const int H, const float *q, const float *keys, size_t stride, const int32_t *kv_index, int n_keys,
                    int d, float scale, float *scores, size_t room) {
    for (int j = 0; j < n_keys; j += 4) {
        const float *key[4];
        for (int k = 0; k < 4; k++) key[k] = keys + kv_index[j + k < n_keys ? j + k : n_keys - 1] * stride;
        for (int k = 0; k < 4; k++) {
            const float *ahead = keys + kv_index[j + k + SOON < n_keys ? j + k + SOON : n_keys - 1] * stride;
            for (int i = 0; i < d; i += 16) __builtin_prefetch(ahead + i);
        }
        f8 sum[MOST_HEADS][4] = {{{0}}};
        for (int i = 0; i < d; i += 8) {
            f8 x[MOST_HEADS];
            for (int h = 0; h < H; h++) {
                x[h] = *(const f8 *)(q + h * d + i);
                KEEP(x[h]);
            }
            for (int k = 0; k < 4; k++) {
                f8 here = *(const f8 *)(key[k] + i);
                KEEP(here);
                for (int h = 0; h < H; h++) sum[h][k] = fma8(x[h], here, sum[h][k]);
            }
        }
        for (int h = 0; h < H; h++) sum_four(sum[h][0], sum[h][1], sum[h][2], sum[h][3], scale, scores + h * room + j);
    }
    for (int h = 0; h < H; h++)
        for (int j = n_keys; j < n_keys + 8; j++) scores[h * room + j] = -INFINITY;
}

/* Replace scores by softmax weights, not normalised; returns their sum. */
static float weigh(float *scores, int n_keys) {
    f8 tops = *(f8 *)scores, total = splat(0.0f);
    for (int j = 8; j < n_keys; j += 8) tops = larger(*(f8 *)(scores + j), tops);
    f8 most = splat(largest(tops));
    for (int j = 0; j < n_keys; j += 8) {
        f8 weight = exp8(*(f8 *)(scores + j) - most);
        *(f8 *)(scores + j) = weight;
        total += weight;
    }
    return sum8(total);
}

/* N vectors of out [H][d]: the weighted sum of values */
UNROLLED void gather(const int H, const int N, const float *values, size_t stride, const int32_t *kv_index, int n_keys,
                     int d, const float *weights, size_t room, const float *totals, float *out) {
    f8 sum[MOST_HEADS][8] = {{{0}}};
    for (int j = 0; j < n_keys; j++) {
        const float *value = values + kv_index[j] * stride;
        const float *ahead = values + kv_index[j + SOON < n_keys ? j + SOON : n_keys - 1] * stride;
        for (int i = 0; i < N; i += 2) __builtin_prefetch(ahead + 8 * i);
        f8 weight[MOST_HEADS];
        for (int h = 0; h < H; h++) weight[h] = splat(weights[h * room + j]);
        for (int i = 0; i < N; i++) {
            f8 here = *(const f8 *)(value + 8 * i);
            KEEP(here);
            for (int h = 0; h < H; h++) sum[h][i] = fma8(weight[h], here, sum[h][i]);
        }
    }
    for (int h = 0; h < H; h++)
        for (int i = 0; i < N; i++) *(f8 *)(out + h * d + 8 * i) = sum[h][i] * splat(1.0f / totals[h]);
}

/* Attention of H heads q [H][d] of one token to n_keys keys, key j at memory[kv_index[j]]; d is a multiple of 8; scores
   has room for n_keys + 8 of each head. */
UNROLLED void attend_heads(const int H, const float *q, const float *keys, const float *values, size_t stride,
                           const int32_t *kv_index, int n_keys, int d, float scale, float *scores, size_t room, float *out) {
    float totals[MOST_HEADS];
    score(H, q, keys, stride, kv_index, n_keys, d, scale, scores, room);
    for (int h = 0; h < H; h++) totals[h] = weigh(scores + h * room, n_keys);
    int i = 0;
    for (; i + 32 <= d; i += 32) gather(H, 4, values + i, stride, kv_index, n_keys, d, scores, room, totals, out + i);
    for (; i < d; i += 8) gather(H, 1, values + i, stride, kv_index, n_keys, d, scores, room, totals, out + i);
}

/* Attention of q [token][stride_q], heads first, -> out [token][n_q][d]. Token t sees its first seen[t] keys; key j is
   at kv_index[t][j] of memory [token][2 n_kv][d], keys before values. Members take the pieces in turn. */
typedef struct {
    const float *q, *memory;
    int stride_q, n_tokens, n_q, n_kv, d, longest;
    float scale;
    const int32_t *const *kv_index, *seen;
    float *out;
} attention;

static void attend_some(const member *m, const attention *a, atomic_int *next) {
    int n_tokens = a->n_tokens, n_kv = a->n_kv, d = a->d;
    size_t stride = (size_t)2 * n_kv * d, room = a->longest + 8;
    int group = a->n_q / n_kv, n_alone = n_tokens * n_kv;
    int most = m->n > 1 && n_alone < 4 * m->n ? 1 : MOST_HEADS; /* 1: better balance of few pieces */
    int n_tiles = (group + most - 1) / most;
    float *scores = malloc(MOST_HEADS * room * sizeof(float));
    for (int at; (at = atomic_fetch_add(next, 1)) < n_alone * n_tiles;) {
        int tile = at % n_tiles, token = at / n_tiles % n_tokens, kv = at / n_tiles / n_tokens;
        int first = tile * group / n_tiles, n = (tile + 1) * group / n_tiles - first, head = kv * group + first;
        const float *from = a->q + (size_t)token * a->stride_q + (size_t)head * d, *keys = a->memory + (size_t)kv * d;
        const float *values = keys + (size_t)n_kv * d;
        const int32_t *where = a->kv_index[token];
        int seen = a->seen[token];
        float *to = a->out + ((size_t)token * a->n_q + head) * d, scale = a->scale;
        switch (n) {
        case 1: attend_heads(1, from, keys, values, stride, where, seen, d, scale, scores, room, to); break;
        case 2: attend_heads(2, from, keys, values, stride, where, seen, d, scale, scores, room, to); break;
        case 3: attend_heads(3, from, keys, values, stride, where, seen, d, scale, scores, room, to); break;
        }
    }
    free(scores);
}

typedef struct {
    attention of;
    atomic_int next; /* piece */
} attention_alone;

static void attend_part(const member *m, void *arg) {
    attention_alone *a = arg;
    attend_some(m, &a->of, &a->next);
}

/* q [token][stride_q], heads first, -> out [token][n_q][d]. Token t belongs to text[t] and sees its first seen[t] keys;
   key j of a text is at kv_index[text][j] of memory [token][2 n_kv][d], keys before values. */
void attend(int n_threads, const float *q, int stride_q, int n_tokens, int n_q, int n_kv, int d, float scale,
            const float *memory, const int32_t *kv_index, int longest, const int32_t *text, const int32_t *seen,
            float *out) {
    const int32_t **each = malloc(n_tokens * sizeof *each);
    for (int token = 0; token < n_tokens; token++) each[token] = kv_index + (size_t)text[token] * longest;
    attention_alone a = {{q, memory, stride_q, n_tokens, n_q, n_kv, d, longest, scale, each, seen, out}, 0};
    together(n_threads, attend_part, &a);
    free(each);
}

#include "forward.h"

/* ---- sampling ---- */

#define NOISE_MAX 22.8739f /* saguaro.rng.GUMBEL_MAX */
#define NEAR 4.0f          /* scores this close to the best are tried first: they set a lower bound for the others */
#define RUN 64             /* tokens processed together */

typedef struct {
    float *scores; /* [n], best first; of ties the lower token first */
    int64_t *tokens;
    int n;
} best;

static inline void offer(best *found, int64_t token, float score) {
    int i = found->n - 1;
    float last = found->scores[i];
    if (!(score > last || (score == last && token < found->tokens[i]))) return;
    for (; i > 0; i--) {
        float before = found->scores[i - 1];
        if (!(score > before || (score == before && token < found->tokens[i - 1]))) break;
        found->scores[i] = before;
        found->tokens[i] = found->tokens[i - 1];
    }
    found->scores[i] = score;
    found->tokens[i] = token;
}

/* Philox4x32-10 of saguaro.rng: the words of RUN tokens from `first` on, a multiple of 4; four tokens per counter. */
static void draw(uint32_t first, uint32_t position, uint32_t domain, uint64_t seed, uint32_t words[RUN]) {
    uint32_t c0[RUN / 4], c1[RUN / 4], c2[RUN / 4], c3[RUN / 4], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < RUN / 4; i++) c0[i] = first / 4 + i, c1[i] = position, c2[i] = 0, c3[i] = domain;
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < RUN / 4; i++) {
            uint64_t p0 = (uint64_t)c0[i] * 0xD2511F53u, p1 = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)p1;
            c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)p0;
        }
    for (int i = 0; i < RUN / 4; i++)
        words[4 * i] = c0[i], words[4 * i + 1] = c1[i], words[4 * i + 2] = c2[i], words[4 * i + 3] = c3[i];
}

static inline float gumbel(uint32_t word) {
    float u = ((float)(int64_t)word + 0.5f) * 0x1p-32f, top = 1.0f - 0x1p-24f;
    return -logf(-log1pf(-(u < top ? u : top)));
}

/* If fewer than n tokens have a finite score, fill up with the lowest of the others. */
static void fill_up(best *found) {
    int n_said = 0;
    while (n_said < found->n && found->scores[n_said] > -INFINITY) n_said++;
    int64_t next = 0;
    for (int i = n_said; i < found->n; i++, next++) {
        for (int j = 0; j < n_said; j++)
            if (found->tokens[j] == next) next++, j = -1;
        found->tokens[i] = next;
    }
}

/* The n best tokens of a row by noisy score; see rank. The noise of a word u (divided by 2^32) is at most -log u, so a
   token can reach the bar only if u is at most e^(score - bar). */
static void rank_warm(const float *x, int n_known, float top, float temperature, uint64_t seed, uint32_t position,
                      uint32_t domain, best *found) {
    float run[RUN]; /* scores */
    uint32_t words[RUN];
    for (int pass = 0; pass < 2; pass++) /* scores near the best, then all others */
        for (int from = 0; from < n_known; from += RUN) {
            int n = n_known - from < RUN ? n_known - from : RUN, is_any = 0;
            float bar = pass ? found->scores[found->n - 1] : -INFINITY, least = pass ? bar - NOISE_MAX : -NEAR;
            for (int i = 0; i < n; i++) run[i] = (x[from + i] - top) / temperature;
            for (int i = n; i < RUN; i++) run[i] = -INFINITY;
            for (int i = 0; i < RUN; i++) is_any |= run[i] >= least;
            if (!is_any) continue;
            draw(from, position, domain, seed, words);
            for (int i = 0; i < RUN; i += 8) {
                f8 away = *(f8 *)(run + i) - splat(bar), most = splat(0.0f);
                i8 is_high = away > splat(0.0f);
                away = (f8)(~is_high & (i8)away); /* at most 0, since u is below 1 */
                most = exp8(away) * splat(1.00001f);
                i8 halves = (i8)(*(u8 *)(words + i) >> 1);
                i8 may = __builtin_convertvector(halves, f8) * splat(0x1p-31f) <= most;
                for (int j = i; j < i + 8; j++)
                    if (may[j - i] && run[j] >= least && (run[j] >= -NEAR) == !pass)
                        offer(found, from + j, run[j] + gumbel(words[j]));
            }
        }
}

typedef struct {
    const float *logits;
    int stride, n_rows, n_known;
    const float *temperatures;
    const int64_t *seeds, *positions;
    int domain, n;
    int64_t *tokens;
    float *scores;
    atomic_int next; /* row */
} ranking;

static void rank_row(const ranking *r, int row) {
    int n = r->n, n_known = r->n_known;
    const float *x = r->logits + (size_t)row * r->stride;
    best found = {r->scores + (size_t)row * n, r->tokens + (size_t)row * n, n};
    for (int i = 0; i < n; i++) found.scores[i] = -INFINITY, found.tokens[i] = i;
    float top = -INFINITY;
    int is_odd = 0;
    for (int token = 0; token < n_known; token++) {
        top = x[token] > top ? x[token] : top;
        is_odd |= !(x[token] <= FLT_MAX);
    }
    if (is_odd) {
        for (int i = 0; i < n; i++) found.scores[i] = NAN;
        return;
    }
    if (r->temperatures[row] > 0.0f) {
        rank_warm(x, n_known, top, r->temperatures[row], (uint64_t)r->seeds[row], (uint32_t)r->positions[row], r->domain,
                  &found);
        fill_up(&found);
        return;
    }
    for (int from = 0; from < n_known; from += RUN) {
        int to = from + RUN < n_known ? from + RUN : n_known, is_any = to - from < RUN;
        float bar = found.scores[n - 1] + top;
        bar -= 1e-6f * fabsf(bar); /* the difference was rounded */
        if (!is_any)
            for (int i = 0; i < RUN; i++) is_any |= x[from + i] >= bar;
        for (int token = from; is_any && token < to; token++) offer(&found, token, x[token] - top);
    }
    fill_up(&found);
}

static void rank_part(const member *m, void *arg) {
    ranking *r = arg;
    (void)m;
    for (int row; (row = atomic_fetch_add(&r->next, 1)) < r->n_rows;) rank_row(r, row);
}

/* The n best tokens of each row of logits [row][stride], of which n_known are tokens, and their scores, best first:
   (logit - best logit) / temperature + noise, or logit - best logit at temperature 0. Of ties the lower token comes
   first; tokens with a logit of -inf come last. A row with a NaN or +inf logit has only NaN scores. */
void rank(int n_threads, const float *logits, int stride, int n_rows, int n_known, const float *temperatures,
          const int64_t *seeds, const int64_t *positions, int domain, int n, int64_t *tokens, float *scores) {
    ranking r = {logits, stride, n_rows, n_known, temperatures, seeds, positions, domain, n, tokens, scores, 0};
    together(n_rows > 1 ? n_threads : 1, rank_part, &r);
}

/* ---- growth ---- */

#include "growth.h"
