/* Matrix products, and what is computed on their outputs right away: gates, or heads with norms and rope. */

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
