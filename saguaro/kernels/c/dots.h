/* Products of int8 rows with a panel of int8 weights. Sums are exact, so their order does not matter, and every
   instruction set gives the same ones.

   TOGETHER inputs lie side by side in a weight matrix, because one instruction multiplies and adds so many. Input rows
   are input_t: the steps plus ZERO. x86 multiplies four unsigned by four signed bytes, so steps are stored with 128
   added, and a matrix has for each output what that adds to its sum, negated (its `offsets`). */

#define PANEL 16   /* outputs whose weights lie side by side */
#define AHEAD 8192 /* prefetch distance of weights in bytes */

/* Each instruction set has: a panel's weights for TOGETHER inputs, `lanes` for a part of its sums, and what adds the
   products of these weights and TOGETHER inputs of a row. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TOGETHER 4
#define ZERO 128
#define MOST_INT8_ROWS 16 /* rows whose sums fit the registers */
typedef uint8_t input_t;
typedef int32_t lanes __attribute__((vector_size(64), aligned(4)));
typedef struct { __m512i part[1]; } panel_weights;

static inline panel_weights weights_at(const int8_t *w) { return (panel_weights){{_mm512_loadu_si512(w)}}; }

static inline void add_dots(lanes *sum, panel_weights w, const input_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    sum[0] = (lanes)_mm512_dpbusd_epi32((__m512i)sum[0], _mm512_set1_epi32(four), w.part[0]);
}

#elif defined(__AVXVNNI__)
#define TOGETHER 4
#define ZERO 128
#define MOST_INT8_ROWS 6
typedef uint8_t input_t;
typedef i8 lanes;
typedef struct { __m256i part[2]; } panel_weights;

static inline panel_weights weights_at(const int8_t *w) {
    return (panel_weights){{_mm256_loadu_si256((const __m256i *)w), _mm256_loadu_si256((const __m256i *)w + 1)}};
}

static inline void add_dots(lanes *sum, panel_weights w, const input_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    __m256i x = _mm256_set1_epi32(four);
    for (int k = 0; k < 2; k++) sum[k] = (lanes)_mm256_dpbusd_avx_epi32((__m256i)sum[k], x, w.part[k]);
}

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define TOGETHER 4
#define ZERO 0
#define MOST_INT8_ROWS 6
typedef int8_t input_t;
typedef int32_t lanes __attribute__((vector_size(16), aligned(4)));
typedef struct { int8x16_t part[4]; } panel_weights;

static inline panel_weights weights_at(const int8_t *w) {
    return (panel_weights){{vld1q_s8(w), vld1q_s8(w + 16), vld1q_s8(w + 32), vld1q_s8(w + 48)}};
}

static inline void add_dots(lanes *sum, panel_weights w, const input_t *q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    for (int k = 0; k < 4; k++) sum[k] = (lanes)vdotq_s32((int32x4_t)sum[k], w.part[k], x);
}

#else
#define TOGETHER 2
#define ZERO 0
#define MOST_INT8_ROWS 6
typedef int16_t input_t; /* as wide as the weights become */
typedef i8 lanes;
typedef struct { h16 part[2]; } panel_weights;

static inline h16 widen(const int8_t *w) {
#ifdef __AVX2__
    return (h16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
#else
    return __builtin_convertvector(*(const b16 *)w, h16);
#endif
}

static inline panel_weights weights_at(const int8_t *w) { return (panel_weights){{widen(w), widen(w + PANEL)}}; }

static inline void add_dots(lanes *sum, panel_weights w, const input_t *q) {
    int32_t pair;
    memcpy(&pair, q, sizeof pair);
    i8 x = {pair, pair, pair, pair, pair, pair, pair, pair};
    for (int k = 0; k < 2; k++) {
#ifdef __AVX2__
        sum[k] += (i8)_mm256_madd_epi16((__m256i)w.part[k], (__m256i)x);
#else
        i8 a = (i8)w.part[k];
        sum[k] += (a << 16 >> 16) * (x << 16 >> 16) + (a >> 16) * (x >> 16);
#endif
    }
}
#endif

#define PARTS (int)(PANEL * sizeof(int32_t) / sizeof(lanes))

/* R rows times a panel, with U sums for each row: additions to one sum alone would wait for each other. */
UNROLLED void int8_tile(const int R, const int U, const input_t *q, const int8_t *w, const int32_t *offsets, int width,
                        int32_t *sums) {
    lanes sum[MOST_INT8_ROWS][4][PARTS];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < U; u++)
            for (int k = 0; k < PARTS; k++) sum[r][u][k] = (lanes){0};
    for (int i = 0; i < width; i += U * TOGETHER)
        for (int u = 0; u < U; u++, w += TOGETHER * PANEL) {
            panel_weights here = weights_at(w);
            __builtin_prefetch(w + AHEAD, 0, 0); /* non-temporal: a step reads weights once */
            for (int r = 0; r < R; r++) add_dots(sum[r][u], here, q + (size_t)r * width + i + u * TOGETHER);
        }
    for (int r = 0; r < R; r++)
        for (int k = 0; k < PARTS; k++) {
            int at = k * PANEL / PARTS;
            for (int u = 1; u < U; u++) sum[r][0][k] += sum[r][u][k];
            *(lanes *)(sums + r * PANEL + at) = sum[r][0][k] + *(const lanes *)(offsets + at);
        }
}

static void int8_tiles(int n, const input_t *q, const int8_t *w, const int32_t *offsets, int width, int32_t *sums) {
#define TILE(R, U)                                                                                                     \
    case R: int8_tile(R, U, q, w, offsets, width, sums); break
    switch (n) {
        TILE(1, 4);
        TILE(2, 2);
        TILE(3, 2);
        TILE(4, 1);
        TILE(5, 1);
        TILE(6, 1);
#if MOST_INT8_ROWS > 6
        TILE(7, 1);
        TILE(8, 1);
        TILE(9, 1);
        TILE(10, 1);
        TILE(11, 1);
        TILE(12, 1);
        TILE(13, 1);
        TILE(14, 1);
        TILE(15, 1);
        TILE(16, 1);
#endif
    }
#undef TILE
}

/* What callers allocate: TOGETHER, ZERO and the bytes of an input. */
void int8_format(int32_t *together, int32_t *zero, int32_t *n_bytes) {
    *together = TOGETHER;
    *zero = ZERO;
    *n_bytes = sizeof(input_t);
}
