/* The products and the attention of a model on a CPU, with weights in float32 or int8, and what is chosen of its logits.

   What a row (a token) gives depends on that row alone, to the bit: every number is made by the same instructions in the
   same order however many rows there are. Rows lie one after the other. Whoever calls has checked shapes; all sizes are
   counts of elements.

   In int8 an input row is rounded on a scale of its own, and a weight on one scale for each output. Before that both are
   turned by a Hadamard matrix over `mixed` neighbours, which leaves their product as it is and spreads an input that is
   far larger than the others, which would else spoil the scale. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 127.0f
#define LEAST 1e-30f /* a scale, where all is 0 */
#define SMALL 65536  /* weights; fewer are not worth a second thread */

typedef float f8 __attribute__((vector_size(32), aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4)));

static inline float sum8(f8 v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

static inline f8 splat(float x) { return (f8){x, x, x, x, x, x, x, x}; }

/* e^x for x <= 88, within 2 units in the last place; e^-87 for anything less */
static inline f8 exp8(f8 x) {
    f8 low = splat(-87.0f), magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
    i8 is_low = x < low;
    x = (f8)((is_low & (i8)low) | (~is_low & (i8)x));
    f8 whole = x * splat(1.44269504f) + magic;
    i8 n = (i8)whole - (i8)magic;
    whole -= magic;
    f8 r = x - whole * splat(0.693359375f) - whole * splat(-2.12194440e-4f);
    f8 p = splat(1.9875691500e-4f) * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    return p * (f8)((n + 127) << 23);
}

/* ---- rounding ---- */

static void turn(float *x, int n, int mixed) {
    float unit = 1.0f / sqrtf((float)mixed);
    for (int at = 0; at < n; at += mixed) {
        float *block = x + at;
        for (int half = 1; half < mixed; half *= 2)
            for (int i = 0; i < mixed; i += 2 * half)
                for (int j = i; j < i + half; j++) {
                    float a = block[j], b = block[j + half];
                    block[j] = a + b;
                    block[j + half] = a - b;
                }
        for (int i = 0; i < mixed; i++) block[i] *= unit;
    }
}

/* one turned row -> its scale, and its steps: n of them, then zeros up to width */
static float round_row(const float *x, int n, int width, int16_t *q) {
    float most = LEAST;
    int is_odd = 0;
    for (int i = 0; i < n; i++) {
        float size = fabsf(x[i]);
        is_odd |= !(size <= FLT_MAX);
        most = size > most ? size : most;
    }
    float to_steps = STEPS / most;
    for (int i = 0; i < n; i++) q[i] = (int16_t)__builtin_rintf(x[i] * to_steps);
    memset(q + n, 0, (width - n) * sizeof(int16_t));
    return is_odd ? NAN : most / STEPS; /* what is no number gives none */
}

/* from a row to the same through an RMS norm, if there is one */
static void norm_row(const float *from, int n, const float *norm, float eps, float *to) {
    if (!norm) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    f8 squares = splat(0.0f);
    int i = 0;
    for (; i + 8 <= n; i += 8) squares += *(const f8 *)(from + i) * *(const f8 *)(from + i);
    float sum = sum8(squares);
    for (; i < n; i++) sum += from[i] * from[i];
    float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i < n; i++) to[i] = from[i] * scale * norm[i];
}

/* rows through an RMS norm, if there is one, and zeros up to width */
void norm_rows(const float *x, int n_rows, int n, const float *norm, float eps, int width, float *y) {
    for (int row = 0; row < n_rows; row++) {
        norm_row(x + (size_t)row * n, n, norm, eps, y + (size_t)row * width);
        memset(y + (size_t)row * width + n, 0, (width - n) * sizeof(float));
    }
}

/* rows of floats -> rows of steps; through an RMS norm first if there is one */
void round_rows(const float *x, int n_rows, int n, int mixed, const float *norm, float eps, int width, int16_t *q,
                float *scales) {
#pragma omp parallel for if (n_rows >= 16)
    for (int row = 0; row < n_rows; row++) {
        float *y = malloc(n * sizeof(float));
        norm_row(x + (size_t)row * n, n, norm, eps, y);
        turn(y, n, mixed);
        scales[row] = round_row(y, n, width, q + (size_t)row * width);
        free(y);
    }
}

/* ---- products ---- */

#define MOST_ROWS 6
#define LINE 64
#define AHEAD 4096 /* bytes: so far ahead weights are asked for, which takes a third of the time of waiting for them */

static inline void ask_for(const void *weights, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i += LINE) __builtin_prefetch((const char *)weights + AHEAD + i);
}

/* sums[r][c] = row r times output c, for R rows and two outputs. Plain loops: compilers make of them what the machine is
   best at. */
#define TILE(R)                                                                                                        \
    static void int8_tile_##R(const int16_t *restrict q, const int8_t *restrict w, int width, int32_t *restrict sums) { \
        int32_t sum[R][2] = {{0}};                                                                                     \
        for (int i = 0; i < width; i++)                                                                                \
            for (int r = 0; r < R; r++)                                                                                \
                for (int c = 0; c < 2; c++)                                                                            \
                    sum[r][c] += (int16_t)w[(size_t)c * width + i] * q[(size_t)r * width + i];                         \
        memcpy(sums, sum, sizeof sum);                                                                                 \
    }                                                                                                                  \
    static void float_tile_##R(const float *x, const float *w, int width, float *sums) {                               \
        f8 sum[R][2] = {{{0}}};                                                                                        \
        for (int i = 0; i < width; i += 8) {                                                                           \
            f8 a = *(const f8 *)(w + i), b = *(const f8 *)(w + width + i);                                             \
            for (int r = 0; r < R; r++) {                                                                              \
                f8 here = *(const f8 *)(x + (size_t)r * width + i);                                                    \
                sum[r][0] += here * a;                                                                                 \
                sum[r][1] += here * b;                                                                                 \
            }                                                                                                          \
        }                                                                                                              \
        for (int r = 0; r < R; r++) sums[2 * r] = sum8(sum[r][0]), sums[2 * r + 1] = sum8(sum[r][1]);                  \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

typedef void (*int8_tile)(const int16_t *, const int8_t *, int, int32_t *);
typedef void (*float_tile)(const float *, const float *, int, float *);
static const int8_tile INT8_TILES[] = {0, int8_tile_1, int8_tile_2, int8_tile_3, int8_tile_4, int8_tile_5, int8_tile_6};
static const float_tile FLOAT_TILES[] = {0,            float_tile_1, float_tile_2, float_tile_3,
                                         float_tile_4, float_tile_5, float_tile_6};

static inline void put(float sum, int row, int out, int n_out, const float *bias, const float *onto, float *y) {
    size_t to = (size_t)row * n_out + out;
    if (bias) sum += bias[out];
    y[to] = onto ? onto[to] + sum : sum;
}

/* y[row][out] = scale[row] * w_scale[out] * (q @ W^T) + bias[out] + onto[row][out]; bias and onto may be absent. W has
   an even number of outputs, one more than n_out if that is odd. */
void multiply_int8(const int16_t *q, const float *scales, int n_rows, const int8_t *w, const float *w_scales, int width,
                   int n_out, const float *bias, const float *onto, float *y) {
    int n_tiles = (n_rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static) if ((size_t)width * n_out >= SMALL)
    for (int out = 0; out < n_out; out += 2) {
        int32_t sums[MOST_ROWS][2];
        const int8_t *here = w + (size_t)out * width;
        ask_for(here, 2 * width);
        for (int tile = 0; tile < n_tiles; tile++) {
            int first = tile * n_rows / n_tiles, n = (tile + 1) * n_rows / n_tiles - first;
            INT8_TILES[n](q + (size_t)first * width, here, width, sums[0]);
            for (int r = 0; r < n; r++)
                for (int c = 0; c < 2 && out + c < n_out; c++) {
                    float sum = (float)sums[r][c] * (scales[first + r] * w_scales[out + c]);
                    put(sum, first + r, out + c, n_out, bias, onto, y);
                }
        }
    }
}

/* The same in float32: y = x @ W^T + bias + onto. */
void multiply_float(const float *x, int n_rows, const float *w, int width, int n_out, const float *bias,
                    const float *onto, float *y) {
    int n_tiles = (n_rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static) if ((size_t)width * n_out >= SMALL)
    for (int out = 0; out < n_out; out += 2) {
        float sums[MOST_ROWS][2];
        const float *here = w + (size_t)out * width;
        ask_for(here, 2 * width * sizeof(float));
        for (int tile = 0; tile < n_tiles; tile++) {
            int first = tile * n_rows / n_tiles, n = (tile + 1) * n_rows / n_tiles - first;
            FLOAT_TILES[n](x + (size_t)first * width, here, width, sums[0]);
            for (int r = 0; r < n; r++)
                for (int c = 0; c < 2 && out + c < n_out; c++) put(sums[r][c], first + r, out + c, n_out, bias, onto, y);
        }
    }
}

/* ---- between products ---- */

static inline f8 silu_times(f8 gate, f8 up) { return gate / (splat(1.0f) + exp8(-gate)) * up; }

/* silu(gate) * up; both [row][n], gates first, in one row of 2 n */
void gate(const float *both, int n_rows, int n, float *y) {
#pragma omp parallel for if (n_rows >= 16)
    for (int row = 0; row < n_rows; row++) {
        const float *gates = both + (size_t)row * 2 * n, *ups = gates + n;
        float *out = y + (size_t)row * n;
        int i = 0;
        for (; i + 8 <= n; i += 8) *(f8 *)(out + i) = silu_times(*(const f8 *)(gates + i), *(const f8 *)(ups + i));
        for (; i < n; i++) out[i] = silu_times(splat(gates[i]), splat(ups[i]))[0];
    }
}

static void norm_head(float *x, int d, const float *norm, float eps) {
    float sum = 0.0f;
    for (int i = 0; i < d; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)d + eps);
    for (int i = 0; i < d; i++) x[i] *= scale * norm[i];
}

/* heads [row][n_q + 2 n_kv][d], changed: norms of their own if there are any, rotation by cos and sin [row][d] (sin
   negative on the first half); keys and values go to memory [slot][2 n_kv][d] */
void turn_heads(float *heads, int n_rows, int n_q, int n_kv, int d, const float *q_norm, const float *k_norm, float eps,
                const float *cosines, const float *sines, float *memory, const int64_t *slots) {
    int n_all = n_q + 2 * n_kv, half = d / 2;
    for (int row = 0; row < n_rows; row++) {
        float *here = heads + (size_t)row * n_all * d;
        const float *c = cosines + (size_t)row * d, *s = sines + (size_t)row * d;
        for (int head = 0; head < n_q + n_kv; head++) {
            float *x = here + (size_t)head * d;
            if (q_norm) norm_head(x, d, head < n_q ? q_norm : k_norm, eps);
            for (int i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a * c[i] + b * s[i];
                x[i + half] = b * c[i + half] + a * s[i + half];
            }
        }
        memcpy(memory + (size_t)slots[row] * 2 * n_kv * d, here + (size_t)n_q * d, 2 * n_kv * d * sizeof(float));
    }
}

/* ---- attention ---- */

/* One query of one head over n_keys keys, key j of it at memory[slots[j]][head]; d a multiple of 8; room for n_keys + 7
   scores. */
static void attend_one(const float *q, const float *keys, const float *values, size_t stride, const int32_t *slots,
                       int n_keys, int d, float scale, float *scores, float *out) {
    int j = 0;
    for (; j + 4 <= n_keys; j += 4) { /* four sums at a time: each waits for itself alone */
        const float *a = keys + slots[j] * stride, *b = keys + slots[j + 1] * stride;
        const float *c = keys + slots[j + 2] * stride, *e = keys + slots[j + 3] * stride;
        f8 sum_a = splat(0.0f), sum_b = sum_a, sum_c = sum_a, sum_e = sum_a;
        for (int i = 0; i < d; i += 8) {
            f8 x = *(const f8 *)(q + i);
            sum_a += x * *(const f8 *)(a + i);
            sum_b += x * *(const f8 *)(b + i);
            sum_c += x * *(const f8 *)(c + i);
            sum_e += x * *(const f8 *)(e + i);
        }
        scores[j] = sum8(sum_a) * scale;
        scores[j + 1] = sum8(sum_b) * scale;
        scores[j + 2] = sum8(sum_c) * scale;
        scores[j + 3] = sum8(sum_e) * scale;
    }
    for (; j < n_keys; j++) {
        const float *key = keys + slots[j] * stride;
        f8 sum = splat(0.0f);
        for (int i = 0; i < d; i += 8) sum += *(const f8 *)(q + i) * *(const f8 *)(key + i);
        scores[j] = sum8(sum) * scale;
    }
    for (; j % 8; j++) scores[j] = -INFINITY;
    f8 tops = *(f8 *)scores;
    for (j = 8; j < n_keys; j += 8) {
        f8 next = *(f8 *)(scores + j);
        i8 is_more = next > tops;
        tops = (f8)((is_more & (i8)next) | (~is_more & (i8)tops));
    }
    float most = tops[0];
    for (int i = 1; i < 8; i++) most = tops[i] > most ? tops[i] : most;
    f8 total = splat(0.0f);
    for (j = 0; j < n_keys; j += 8) {
        f8 weight = exp8(*(f8 *)(scores + j) - splat(most));
        *(f8 *)(scores + j) = weight;
        total += weight;
    }
    memset(out, 0, d * sizeof(float));
    for (int from = 0; from < d; from += 64) {
        int n = d - from < 64 ? (d - from) / 8 : 8;
        f8 sum[8];
        for (int i = 0; i < n; i++) sum[i] = splat(0.0f);
        for (j = 0; j < n_keys; j++) {
            const float *value = values + slots[j] * stride + from;
            f8 weight = splat(scores[j]);
            for (int i = 0; i < n; i++) sum[i] += weight * *(const f8 *)(value + 8 * i);
        }
        f8 share = splat(1.0f / sum8(total));
        for (int i = 0; i < n; i++) *(f8 *)(out + from + 8 * i) = sum[i] * share;
    }
}

/* q [token][stride_q], heads first, -> out [token][n_q][d]. Token t belongs to text[t] and sees its first seen[t] keys;
   key j of a text lies in memory [slot][2 n_kv][d] at slots[text][j], keys before values. */
void attend(const float *q, int stride_q, int n_tokens, int n_q, int n_kv, int d, const float *memory,
            const int32_t *slots, int longest, const int32_t *text, const int32_t *seen, float *out) {
    size_t stride = (size_t)2 * n_kv * d;
    float scale = 1.0f / sqrtf((float)d);
#pragma omp parallel
    {
        float *scores = malloc((longest + 8) * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (int at = 0; at < n_tokens * n_q; at++) {
            int token = at / n_q, head = at % n_q, kv = head / (n_q / n_kv);
            attend_one(q + (size_t)token * stride_q + (size_t)head * d, memory + (size_t)kv * d,
                       memory + (size_t)(n_kv + kv) * d, stride, slots + (size_t)text[token] * longest, seen[token], d,
                       scale, scores, out + (size_t)at * d);
        }
        free(scores);
    }
}

/* ---- sampling ---- */

#define NOISE_MAX 22.8739f /* saguaro.rng.GUMBEL_MAX */
#define NEAR 4.0f          /* scores this near the best are tried first: they set a bar for the others */
#define RUN 64             /* tokens looked at together */

typedef struct {
    float *scores; /* [n], best first, of ties the lower token first */
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

/* saguaro.rng's Philox4x32-10: the words of RUN tokens from `first` on, a multiple of 4; a counter serves four. */
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

/* Where fewer than n tokens can be said, the lowest of the others. */
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

/* The n best of a row by noisy score; see rank. Noise of a word u (as a share of 2^32) is at most -log u, so only a u
   of at most e^(score - bar) can reach the bar. */
static void rank_warm(const float *x, int n_known, float top, float temperature, uint64_t seed, uint32_t position,
                      uint32_t domain, best *found) {
    float run[RUN]; /* scores */
    uint32_t words[RUN];
    for (int pass = 0; pass < 2; pass++) /* the near ones, then all others */
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
                away = (f8)(~is_high & (i8)away); /* at most 0: e^0 is all there is */
                most = exp8(away) * splat(1.00001f);
                i8 halves = (i8)(*(u8 *)(words + i) >> 1);
                i8 may = __builtin_convertvector(halves, f8) * splat(0x1p-31f) <= most;
                for (int j = i; j < i + 8; j++)
                    if (may[j - i] && run[j] >= least && (run[j] >= -NEAR) == !pass)
                        offer(found, from + j, run[j] + gumbel(words[j]));
            }
        }
}

/* The n best tokens of each row of logits [row][stride], of which n_known are tokens, and their scores, best first:
   (logit - best logit) / temperature + noise, or without either at temperature 0. Of ties the lower token comes first;
   tokens that cannot be said come last. */
void rank(const float *logits, int stride, int n_rows, int n_known, const float *temperatures, const int64_t *seeds,
          const int64_t *positions, int domain, int n, int64_t *tokens, float *scores) {
#pragma omp parallel for
    for (int row = 0; row < n_rows; row++) {
        const float *x = logits + (size_t)row * stride;
        best found = {scores + (size_t)row * n, tokens + (size_t)row * n, n};
        for (int i = 0; i < n; i++) found.scores[i] = -INFINITY, found.tokens[i] = i;
        float top = -INFINITY;
        for (int token = 0; token < n_known; token++) top = x[token] > top ? x[token] : top;
        if (temperatures[row] > 0.0f) {
            rank_warm(x, n_known, top, temperatures[row], (uint64_t)seeds[row], (uint32_t)positions[row], domain, &found);
            fill_up(&found);
            continue;
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
}
