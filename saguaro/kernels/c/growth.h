/* The bookkeeping of a growth step on a CPU: put the nodes just computed into the trees, then pick the next ones. The
   same as saguaro.kernels.grow, with `expand` and `pick` of draft/tree.py as the definition. */

/* See draft/tree.py: P places, of which the last is for what is not used, W children each, paths of D places. */
typedef struct {
    int64_t *token;                                      /* [tree][P][W] */
    float *score;                                        /* [tree][P][W] */
    int64_t *bin, *place;                                /* [row][P][W] */
    int64_t *node, *position, *depth, *path;             /* [row][P], path [row][P][D] */
    uint8_t *is_used;                                    /* [row][P] */
    int64_t *lineage, *root;                             /* [row][P], [row] */
    const int64_t *which;                                /* [row]: its tree */
    int32_t n_rows, n_places, width, n_path;
} trees;

/* Nodes just computed, or picked: n of each row. */
typedef struct {
    int64_t *index;
    uint8_t *is_real;
    int64_t *place, *token, *position, *depth, *path; /* [row][n], path [row][n][D] */
    float *score;
    int32_t n;
} nodes;

/* How likely candidates are; see draft/chance.py. */
typedef struct {
    const float *rate, *edges;
    const int64_t *base; /* [W] */
    int32_t n_edges, n_bins;
    float least, most, sure;
} chances;

/* Children of a node with these scores, best first: their log-chances and bins. */
static void chances_of(const chances *c, const float *scores, int width, int64_t table, int falls, float *logs,
                       int64_t *bins) {
    float top = scores[0], sum = 0.0f, lowest = 0.0f;
    for (int w = 1; w < width; w++) top = scores[w] > top ? scores[w] : top;
    for (int w = 0; w < width; w++) sum += expf(scores[w] - top);
    for (int w = 0; w < width; w++) {
        float share = expf(scores[w] - top) / sum;
        share = share < 1e-6f ? 1e-6f : share > 1.0f - 1e-6f ? 1.0f - 1e-6f : share;
        float odds = logf(share / (1.0f - share));
        int64_t bin = c->base[w] + table;
        for (int e = 0; e < c->n_edges; e++) bin += odds >= c->edges[e];
        float rate = c->rate[bin], log_rate;
        rate = rate < c->least ? c->least : rate > c->most ? c->most : rate;
        log_rate = logf(rate);
        if (log_rate > c->sure) log_rate = c->sure;
        if (falls && log_rate > lowest) log_rate = lowest;
        lowest = log_rate;
        logs[w] = log_rate;
        bins[w] = bin;
    }
}

/* Put the nodes of a row into its tree, with these children. */
static void put_row(const trees *t, int row, const nodes *from, const int64_t *tokens, const float *scores,
                    const chances *c, int is_greedy, int64_t lineages, int falls) {
    int width = t->width, n_path = t->n_path;
    size_t base = t->which[row] * t->n_places;
    float logs[width];
    int64_t bins[width];
    for (int r = 0; r < from->n; r++) {
        size_t at = (size_t)row * from->n + r, to = base + from->place[at];
        chances_of(c, scores + at * width, width, is_greedy ? c->n_bins : 0, falls, logs, bins);
        for (int w = 0; w < width; w++) {
            float own = scores[at * width + w];
            t->token[to * width + w] = tokens[at * width + w];
            t->score[to * width + w] = own > -INFINITY && own < INFINITY ? from->score[at] + logs[w] : -INFINITY;
            t->bin[to * width + w] = bins[w];
            t->place[to * width + w] = -1;
        }
        int64_t index = from->index[at], known = index < 0 ? 0 : index;
        int64_t line = (t->lineage[base + known / width] * (width + 1) + known % width + 1) % lineages;
        t->node[to] = index;
        t->position[to] = from->position[at];
        t->depth[to] = from->depth[at];
        memcpy(t->path + to * n_path, from->path + at * n_path, n_path * sizeof(int64_t));
        t->is_used[to] = 1;
        t->lineage[to] = index < 0 ? 0 : line;
        if (from->is_real[at] && index >= 0) t->place[base * width + index] = from->place[at];
    }
}

/* The likeliest open node of a row; of equal ones by lineage, and of siblings the better rank. -1: none is left. */
static int64_t next_open(const trees *t, int row, int depth, int is_chain, const uint8_t *is_taken) {
    size_t base = t->which[row] * t->n_places;
    int width = t->width;
    int64_t found = -1;
    float most = -INFINITY;
    for (int at = 0; at < t->n_places; at++) {
        if (t->depth[base + at] >= depth || !t->is_used[base + at]) continue;
        for (int w = 0; w < (is_chain ? 1 : width); w++) {
            int64_t cell = (int64_t)at * width + w;
            float own = t->score[base * width + cell];
            if (!(own > -INFINITY) || own < most || t->place[base * width + cell] >= 0 || is_taken[cell]) continue;
            if (own == most && t->lineage[base + at] >= t->lineage[base + found / width]) continue;
            found = cell;
            most = own;
        }
    }
    return found;
}

/* Pick nodes of a row. Returns how many are real; the rest is padding. */
static int pick_row(const trees *t, int row, int depth, int is_chain, nodes *to) {
    int width = t->width, n_path = t->n_path, n_real = 0, spot = 0;
    size_t base = t->which[row] * t->n_places;
    uint8_t is_taken[(size_t)t->n_places * width];
    memset(is_taken, 0, sizeof is_taken);
    for (int r = 0; r < to->n; r++) {
        int64_t cell = r > n_real ? -1 : next_open(t, row, depth, is_chain, is_taken);
        while (spot < t->n_places && t->is_used[base + spot]) spot++;
        int is_real = cell >= 0 && spot < t->n_places;
        if (is_real) is_taken[cell] = 1, n_real++;
        size_t at = (size_t)row * to->n + r, above = base + (is_real ? cell / width : t->root[t->which[row]]);
        int64_t place = is_real ? spot++ : t->n_places - 1, deep = t->depth[above];
        to->index[at] = is_real ? cell : 0;
        to->is_real[at] = is_real;
        to->place[at] = place;
        to->token[at] = is_real ? t->token[base * width + cell] : 0;
        to->position[at] = t->position[above] + 1;
        to->depth[at] = deep + 1;
        to->score[at] = is_real ? t->score[base * width + cell] : -INFINITY;
        memcpy(to->path + at * n_path, t->path + above * n_path, n_path * sizeof(int64_t));
        to->path[at * n_path + (deep < n_path ? deep : n_path - 1)] = place;
    }
    return n_real;
}

/* Put the nodes `before`, if any, into the trees; then pick nodes into `after`. Returns the most real ones of a row. */
int advance(const trees *t, const nodes *before, const int64_t *tokens, const float *scores, const chances *c,
            const float *temperatures, int64_t lineages, int depth, int is_chain, int falls, nodes *after) {
    int most = 0;
    for (int row = 0; row < t->n_rows; row++) {
        if (before) put_row(t, row, before, tokens, scores, c, temperatures[row] == 0.0f, lineages, falls);
        if (!after) continue;
        int n_real = pick_row(t, row, depth, is_chain, after);
        most = n_real > most ? n_real : most;
    }
    return most;
}

/* The probability that expanding each row's likeliest open node adds an accepted token, as estimated: how likely the
   node is, times how likely the best child of an expanded node is on average; is_drawn: the average on its own path. */
void worth(const trees *t, int is_drawn, float least, double *found) {
    for (int row = 0; row < t->n_rows; row++) {
        size_t base = t->which[row] * t->n_places;
        float most = -INFINITY;
        int64_t depth = 1;
        double sum = 0.0;
        int n = 0;
        for (int at = 0; at < t->n_places; at++) {
            const float *own = t->score + (base + at) * t->width;
            for (int w = 0; w < t->width; w++)
                if (own[w] > most && t->place[(base + at) * t->width + w] < 0) most = own[w], depth = t->depth[base + at] + 1;
            if (!(own[0] > -INFINITY)) continue;
            int64_t node = t->node[base + at];
            float above = node < 0 ? 1.0f : expf(t->score[base * t->width + node]);
            sum += expf(own[0]) / (above < least ? least : above);
            n++;
        }
        found[row] = is_drawn ? expf(most + most / depth) : expf(most) * sum / (n ? n : 1);
    }
}

/* Where an outcome leads: see Landing in draft/tree.py. names: NO_TREE and AT_PLACE. */
void land(const trees *t, const int64_t *nodes, const int64_t *bonus, int no_tree, int at_place, uint8_t *is_tree,
          uint8_t *is_hit, int64_t *root, int64_t *last, int64_t *chosen) {
    int width = t->width, n_path = t->n_path;
    for (int row = 0; row < t->n_rows; row++) {
        size_t base = t->which[row] * t->n_places;
        int64_t top = t->root[t->which[row]], node = nodes[row], at = at_place - node, found = -1, after = -1;
        is_tree[row] = node != no_tree;
        at = at < 0 ? 0 : at >= t->n_places ? t->n_places - 1 : at;
        if (node <= at_place) node = t->node[base + at];
        int64_t cell = node < 0 ? 0 : node, own = node < 0 ? top : t->place[base * width + cell];
        last[row] = own < 0 ? cell / width : own; /* the node itself, or the place that lists it */
        size_t below = (base + last[row]) * width;
        for (int w = 0; w < width && own >= 0 && found < 0; w++)
            if (t->token[below + w] == bonus[row] && t->score[below + w] > -INFINITY) found = w;
        if (found >= 0) after = t->place[below + found];
        is_hit[row] = is_tree[row] && after >= 0;
        root[row] = is_hit[row] ? after : 0;
        int64_t *ranks = chosen + (size_t)row * (n_path + 1), deep = t->depth[base + last[row]];
        for (int level = 0; level <= n_path; level++) {
            int64_t way = level < n_path ? t->path[(base + last[row]) * n_path + level] : -1;
            ranks[level] = way < 0 ? -1 : t->node[base + way] % width;
        }
        ranks[deep < n_path ? deep : n_path] = own < 0 ? cell % width : found;
    }
}

/* The likeliest node below a root that is not shown yet; -1: none. */
static int64_t next_below(const trees *t, size_t base, int64_t top, int64_t n_above, float above, int depth,
                          const uint8_t *is_taken, float *score) {
    int64_t found = -1;
    for (int at = 0; at < t->n_places; at++) {
        if (!t->is_used[base + at] || t->depth[base + at] - n_above >= depth) continue;
        if (n_above > 0 && t->path[(base + at) * t->n_path + n_above - 1] != top) continue;
        for (int w = 0; w < t->width; w++) {
            int64_t cell = (int64_t)at * t->width + w;
            float own = t->score[base * t->width + cell] - above;
            if (!(own > -INFINITY) || is_taken[cell] || (found >= 0 && own < *score)) continue;
            if (found >= 0 && own == *score && t->lineage[base + at] >= t->lineage[base + found / t->width]) continue;
            found = cell;
            *score = own;
        }
    }
    return found;
}

/* Write the n likeliest nodes of each row up to `depth` below a root: node, token, parent, bits of the score; node -1: no
   more. A row that is not shown has none. */
void show(const trees *t, const int64_t *root, const uint8_t *is_shown, int n, int depth, int is_chain, int64_t *out,
          int stride) {
    int width = t->width;
    for (int row = 0; row < t->n_rows; row++) {
        size_t base = t->which[row] * t->n_places;
        int64_t top = root[row], known = t->node[base + top], n_above = t->depth[base + top], at = top, picked[n];
        float above = known < 0 ? 0.0f : t->score[base * width + known];
        uint8_t is_taken[(size_t)t->n_places * width];
        memset(is_taken, 0, sizeof is_taken);
        for (int r = 0; r < n; r++) {
            int64_t *to = out + (size_t)row * stride + 4 * r, cell = -1, parent = -1;
            float score = -INFINITY;
            if (is_shown[row] && is_chain && at >= 0 && r < depth) {
                score = t->score[(base + at) * width] - above;
                if (score > -INFINITY) cell = at * width, at = t->place[(base + at) * width];
            } else if (is_shown[row] && !is_chain) {
                cell = next_below(t, base, top, n_above, above, depth, is_taken, &score);
            }
            if (cell < 0) { /* also for all that follow */
                for (; r < n; r++, to += 4) to[0] = -1, to[1] = to[2] = to[3] = 0;
                break;
            }
            is_taken[cell] = 1;
            picked[r] = cell;
            if (cell / width != top)
                for (int other = 0; other < r; other++)
                    if (picked[other] == t->node[base + cell / width]) parent = other;
            int32_t bits;
            memcpy(&bits, &score, sizeof bits);
            to[0] = cell, to[1] = t->token[base * width + cell], to[2] = parent, to[3] = bits;
        }
    }
}

/* What an outcome teaches and moves. Counts how often a child of each bin was the target's (see draft/chance.py), and
   lists the keys and values that are text now: from sources to goes_to. Returns their number. */
typedef struct {
    const uint8_t *is_tree, *is_hit; /* [row], as the next three from `land` */
    const int64_t *root, *last, *chosen;
    float *hits, *trials, *rate; /* [bin] */
    const float *prior;
    const int64_t *scratch; /* [row]: KV index of place 0 */
    const int32_t *pages;   /* [row][n_pages] */
    int64_t *sources, *goes_to;
    int32_t n_bins, n_pages, page_size;
    float kept, strength;
} settling;

int settle(const trees *t, const settling *s) {
    int width = t->width, n_path = t->n_path, n_moved = 0;
    float kept = 1.0f;
    for (int pass = 0; pass < 2; pass++) { /* first which rows teach anything, then what */
        for (int bin = 0; bin < s->n_bins && pass; bin++) s->hits[bin] *= kept, s->trials[bin] *= kept;
        for (int row = 0; row < t->n_rows; row++) {
            if (!s->is_tree[row]) continue;
            size_t base = t->which[row] * t->n_places;
            int64_t top = t->root[t->which[row]], last = s->last[row];
            const int64_t *path = t->path + (base + last) * n_path, *chosen = s->chosen + (size_t)row * (n_path + 1);
            int is_any = 0;
            for (int level = 0; level <= n_path; level++) {
                int64_t at = level ? path[level - 1] : top;
                for (int w = 0; w < width && at >= 0; w++) {
                    size_t cell = (base + at) * width + w;
                    if (!(t->score[cell] > -INFINITY)) continue;
                    is_any = 1;
                    if (pass) s->trials[t->bin[cell]] += 1.0f, s->hits[t->bin[cell]] += chosen[level] == w;
                }
            }
            if (!pass) {
                kept *= is_any ? s->kept : 1.0f;
                continue;
            }
            path = t->path + (base + (s->is_hit[row] ? s->root[row] : last)) * n_path;
            for (int level = 0; level < n_path; level++) {
                if (path[level] < 0) continue;
                int64_t to = t->position[base + top] + 1 + level;
                s->sources[n_moved] = s->scratch[row] + path[level];
                s->goes_to[n_moved++] =
                    (int64_t)s->pages[(size_t)row * s->n_pages + to / s->page_size] * s->page_size + to % s->page_size;
            }
        }
    }
    for (int bin = 0; bin < s->n_bins; bin++)
        s->rate[bin] = (s->hits[bin] + s->strength * s->prior[bin]) / (s->trials[bin] + s->strength);
    return n_moved;
}
