/* A whole forward pass of a model over paged keys and values: one function that all members of a team run, from phase
   to phase. Between phases they meet:

       heads (norm, product, rope, write) | attention | output product | gate and up product | down product | ...

   The input rows of a product are prepared by every member for itself if they are few, so that no phase is needed. */

typedef struct {
    const matrix *qkv, *out, *gate_up, *down;
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias, *attention_norm, *mlp_norm, *q_norm, *k_norm;
    float *memory; /* [token][2 n_kv][d] */
} layer;

typedef struct {
    const layer *layers;
    const float *embedding;       /* [token][hidden] */
    const float *cosines, *sines; /* [position][d], sin negative on the first half */
    int32_t n_layers, hidden, n_q, n_kv, d, page_size;
    float eps, scale;
} model;

/* See saguaro.attention.step.Step. */
typedef struct {
    const int64_t *tokens, *positions, *kv_index; /* [n_tokens] */
    const int32_t *pages, *starts, *lengths;      /* [n_rows][n_pages], [n_rows + 1], [n_rows] */
    const int32_t *texts, *seen, *paths;          /* [n_rows], [n_tokens], [n_tokens][depth]; NULL: chains */
    const int32_t *taps; /* [n_taps]: layers whose input is kept; n_layers: the output of the last */
    float *features;     /* [n_tokens][n_taps][hidden] */
    int32_t n_tokens, n_rows, n_pages, depth, n_taps;
} step;

typedef struct {
    const model *of;
    const step *s;
    float *x, *heads, *mixed, *gated, *both; /* residual stream; the outputs of each phase */
    char *inputs;                            /* of products: one set of rows for each member, or one for all */
    size_t input_bytes;
    int width, is_private;
    int32_t **where, *seen; /* [n_tokens]: KV index of each key that a token sees, and their number */
    int longest;
    atomic_int *next; /* [n_layers]: piece of attention */
} pass;

/* The input rows of the next product, in the format of its weight: x [row][n] after an optional RMSNorm. */
static rows prepared(const member *m, pass *p, const float *x, int n, const float *norm, const matrix *w, float *room) {
    int n_rows = p->s->n_tokens, first = 0, last = n_rows;
    char *at = p->inputs + (p->is_private ? m->me * p->input_bytes : 0);
    rows to = {at, w->scales ? (float *)(at + (size_t)n_rows * p->width * sizeof(input_t)) : NULL};
    if (!p->is_private) share_of(m, n_rows, &first, &last);
    for (int row = first; row < last; row++)
        prepare_row(x, row, n, w->mixed, norm, p->of->eps, w->width, to, room);
    if (!p->is_private) meet(m);
    return to;
}

/* The KV indices of this member's share of the rows' texts, and of what their nodes see. */
static void find_keys(const member *m, pass *p) {
    const step *s = p->s;
    int size = p->of->page_size, first, last;
    share_of(m, s->n_rows, &first, &last);
    for (int row = first; row < last; row++) {
        int start = s->starts[row], stop = s->starts[row + 1];
        if (start == stop) continue;
        int end = s->lengths[row], text = s->texts && s->texts[row] < end ? s->texts[row] : end;
        int32_t *own = p->where[start]; /* room for `longest` of each token; a text is stored once */
        for (int at = 0; at < text; at++) own[at] = s->pages[(size_t)row * s->n_pages + at / size] * size + at % size;
        for (int token = start; token < stop; token++) {
            int n = s->seen ? s->seen[token] : end - (stop - token) + 1;
            p->seen[token] = n;
            if (n <= text) {
                p->where[token] = own;
            } else {
                int32_t *path = p->where[token];
                if (path != own) memcpy(path, own, text * sizeof *own);
                for (int at = text; at < n; at++) path[at] = s->paths[(size_t)token * s->depth + at - text];
            }
        }
    }
}

/* Keep this member's share of the residual stream that enters a layer, if it is wanted. */
static void tap(const member *m, const pass *p, int layer) {
    const step *s = p->s;
    int first, last, hidden = p->of->hidden;
    share_of(m, s->n_tokens, &first, &last);
    for (int at = 0; at < s->n_taps; at++)
        for (int row = first; s->taps[at] == layer && row < last; row++)
            memcpy(s->features + ((size_t)row * s->n_taps + at) * hidden, p->x + (size_t)row * hidden,
                   hidden * sizeof(float));
}

static void pass_part(const member *m, void *arg) {
    pass *p = arg;
    const model *g = p->of;
    const step *s = p->s;
    int first, last, n_rows = s->n_tokens, n_all = g->n_q + 2 * g->n_kv, hidden = g->hidden;
    float *room = malloc(p->width * sizeof(float));
    share_of(m, n_rows, &first, &last);
    for (int row = first; row < last; row++)
        memcpy(p->x + (size_t)row * hidden, g->embedding + s->tokens[row] * hidden, hidden * sizeof(float));
    find_keys(m, p);
    meet(m);
    for (int i = 0; i < g->n_layers; i++) {
        const layer *l = g->layers + i;
        tap(m, p, i);
        rows in = prepared(m, p, p->x, hidden, l->attention_norm, l->qkv, room);
        heads_product h = {{l->qkv, in, n_rows, l->qkv_bias, NULL, p->heads}, g->n_q, g->n_kv, g->d,
                           l->q_norm, l->k_norm, g->eps, g->cosines, g->sines, s->positions, s->kv_index, l->memory};
        heads_part(m, &h);
        meet(m);
        attend_some(m, &(attention){p->heads, l->memory, n_all * g->d, n_rows, g->n_q, g->n_kv, g->d, p->longest,
                                    g->scale, (const int32_t *const *)p->where, p->seen, p->mixed},
                    p->next + i);
        meet(m);
        in = prepared(m, p, p->mixed, g->n_q * g->d, NULL, l->out, room);
        read_part(m, &(product){l->out, in, n_rows, l->out_bias, p->x, p->x});
        meet(m);
        in = prepared(m, p, p->x, hidden, l->mlp_norm, l->gate_up, room);
        gated_part(m, &(gated_product){{l->gate_up, in, n_rows, l->gate_up_bias, NULL, p->both}, p->gated});
        meet(m);
        in = prepared(m, p, p->gated, l->gate_up->n_out / 2, NULL, l->down, room);
        read_part(m, &(product){l->down, in, n_rows, l->down_bias, p->x, p->x});
        meet(m);
    }
    tap(m, p, g->n_layers);
    free(room);
}

/* x [n_tokens][hidden]: the hidden states before the last norm. Writes the step's keys and values. */
void forward(int n_threads, const model *g, const step *s, float *x) {
    pass p = {.of = g, .s = s, .x = x, .is_private = s->n_tokens < MANY};
    int most_gates = 0, n = s->n_tokens, depth = s->texts ? s->depth : 0;
    p.width = 0;
    for (int i = 0; i < g->n_layers; i++) {
        const layer *l = g->layers + i;
        const matrix *each[] = {l->qkv, l->out, l->gate_up, l->down};
        for (int k = 0; k < 4; k++) p.width = each[k]->width > p.width ? each[k]->width : p.width;
        most_gates = l->gate_up->n_out > most_gates ? l->gate_up->n_out : most_gates;
    }
    for (int row = 0; row < s->n_rows; row++) p.longest = s->lengths[row] > p.longest ? s->lengths[row] : p.longest;
    p.longest += depth;
    p.input_bytes = ((size_t)n * (p.width * (g->layers->qkv->scales ? sizeof(input_t) : 4) + 4) + 63) / 64 * 64;
    size_t n_inputs = p.is_private ? (n_threads > 1 ? n_threads : 1) : 1, n_heads = g->n_q + 2 * g->n_kv;
    p.heads = malloc(n * n_heads * g->d * sizeof(float));
    p.mixed = malloc((size_t)n * g->n_q * g->d * sizeof(float));
    p.both = malloc((size_t)n * most_gates * sizeof(float));
    p.gated = malloc((size_t)n * most_gates / 2 * sizeof(float));
    p.inputs = aligned_alloc(64, n_inputs * p.input_bytes);
    p.where = malloc(n * sizeof *p.where);
    p.seen = malloc(n * sizeof *p.seen);
    p.next = calloc(g->n_layers, sizeof *p.next);
    int32_t *keys = malloc((size_t)n * p.longest * sizeof *keys);
    for (int token = 0; token < n; token++) p.where[token] = keys + (size_t)token * p.longest;
    together(n_threads, pass_part, &p);
    free(keys), free(p.next), free(p.seen), free(p.where), free(p.inputs);
    free(p.gated), free(p.both), free(p.mixed), free(p.heads);
}
