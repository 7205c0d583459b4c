/* Attention: each query by itself, directly from the pages. */

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
