/* Matrix products, and what is computed on their outputs right away: gates, or heads with norms and rope. */

#ifdef __AVX512VL__
#define MOST_FLOAT_ROWS 12 /* rows whose sums fit the registers, with PANEL outputs */
#else
#define MOST_FLOAT_ROWS 6
#endif
#define MOST_ROWS (MOST_INT8_ROWS > MOST_FLOAT_ROWS ? MOST_INT8_ROWS : MOST_FLOAT_ROWS)
#define BLOCK 64 /* inputs per partial sum: keeps float32 accurate */

UNROLLED void float_tile(const int R, const float *x, const float *w, int width, f8 sums[][2]) {
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = splat(0.0f);
    for (int from = 0; from < width; from += BLOCK) {
        f8 sum[MOST_FLOAT_ROWS][2] = {{{0}}};
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

static void float_tiles(int n, const float *x, const float *w, int width, f8 sums[][2]) {
#define TILE(R)                                                                                                        \
    case R: float_tile(R, x, w, width, sums); break
    switch (n) {
        TILE(1);
        TILE(2);
        TILE(3);
        TILE(4);
        TILE(5);
        TILE(6);
#if MOST_FLOAT_ROWS > 6
        TILE(7);
        TILE(8);
        TILE(9);
        TILE(10);
        TILE(11);
        TILE(12);
#endif
    }
#undef TILE
}

static void int8_sums(int n, const input_t *q, const matrix *w, int out, const float *scales, const float *w_scales,
                      f8 sums[][2]) {
    int32_t whole[MOST_INT8_ROWS * PANEL];
    int8_tiles(n, q, (const int8_t *)w->weights + (size_t)out * w->width, w->offsets + out, w->width, whole);
    for (int r = 0; r < n; r++)
        for (int c = 0; c < 2; c++)
            sums[r][c] = __builtin_convertvector(*(i8 *)(whole + r * PANEL + 8 * c), f8) *
                         (splat(scales[r]) * *(const f8 *)(w_scales + 8 * c));
}

/* y = onto + sums + biases for n outputs of a panel; onto may be NULL */
static inline void write_panel(const f8 sums[2], const float *biases, const float *onto, int n, float *y) {
    float from[PANEL] = {0}, to[PANEL];
    int is_whole = n == PANEL;
    if (onto && !is_whole) memcpy(from, onto, n * sizeof *onto);
    const float *before = onto && is_whole ? onto : from;
    float *after = is_whole ? y : to;
    for (int c = 0; c < 2; c++)
        *(f8 *)(after + 8 * c) = *(const f8 *)(before + 8 * c) + (sums[c] + *(const f8 *)(biases + 8 * c));
    if (!is_whole) memcpy(y, to, n * sizeof *y);
}

/* PANEL outputs from `out` on of y [row][n_out] = x @ W^T + bias + onto; bias and onto may be NULL */
static void read_panel(const matrix *w, rows x, int n_rows, const float *bias, const float *onto, int out, float *y) {
    int most = w->scales ? MOST_INT8_ROWS : MOST_FLOAT_ROWS, n_tiles = (n_rows + most - 1) / most, n_out = w->n_out;
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
            int8_sums(n, (const input_t *)x.values + first * width, w, out, x.scales + first, w_scales, sums);
        else
            float_tiles(n, (const float *)x.values + first * width, (const float *)w->weights + out * width, width, sums);
        for (int r = 0; r < n; r++) {
            size_t to = (first + r) * n_out + out;
            write_panel(sums[r], biases, onto ? onto + to : NULL, n_here, y + to);
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
