/* The best tokens of logits by noisy score. */

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
