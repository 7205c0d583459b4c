/* Weights as files store them: decoded row by row, and packed without an intermediate copy. */

/* Types of GGML, by their numbers in a GGUF file. */
enum { F32, F16, Q4_0, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 30 };

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float half_of(uint32_t bits) {
    float size = as_float((bits & 0x7fff) << 13) * 0x1p112f; /* exact, also below the smallest normal number */
    uint32_t odd = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0; /* infinite, or NaN */
    uint32_t found;
    memcpy(&found, &size, sizeof found);
    return as_float((odd ? odd | bits << 13 : found) | (bits & 0x8000) << 16);
}

/* A float of 8 bits: 4 of exponent, 3 of mantissa, no infinity. */
static inline float e4m3_of(uint32_t bits) {
    float size = as_float((bits & 0x7f) << 20) * 0x1p120f; /* exact, also below the smallest normal number */
    uint32_t odd = (bits & 0x7f) == 0x7f ? 0x7fc00000 : 0; /* NaN */
    uint32_t found;
    memcpy(&found, &size, sizeof found);
    return as_float((odd ? odd : found) | (bits & 0x80) << 24);
}

static inline float half_at(const uint8_t *p) { return half_of(p[0] | (uint32_t)p[1] << 8); }

/* Blocks of 32: y = d * (q - zero) or d * q + m, with 4 bits of q, and a fifth from `high`. */
static void small_block(const uint8_t *q, uint32_t high, float d, float m, int zero, int has_m, float *y) {
    for (int half = 0; half < 2; half++)
        for (int j = 0; j < 16; j++) {
            int e = 16 * half + j, value = (q[j] >> 4 * half & 15) | (int)(high >> e & 1) << 4;
            float x = d * (float)(value - zero);
            y[e] = has_m ? x + m : x;
        }
}

static inline uint32_t word_at(const uint8_t *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void q2_k(const uint8_t *b, float *y) {
    const uint8_t *scales = b, *q = b + 16;
    float d = half_at(b + 80), least = half_at(b + 82);
    for (int s = 0; s < 16; s++) {
        float scale = d * (float)(scales[s] & 15), m = least * (float)(scales[s] >> 4);
        const uint8_t *from = q + s / 8 * 32 + s % 2 * 16;
        for (int j = 0; j < 16; j++) y[16 * s + j] = scale * (float)(from[j] >> s % 8 / 2 * 2 & 3) - m;
    }
}

static void q3_k(const uint8_t *b, float *y) {
    const uint8_t *high = b, *q = b + 32, *scales = b + 96;
    float d = half_at(b + 108);
    for (int s = 0; s < 16; s++) {
        int whole = (scales[s % 8] >> s / 8 * 4 & 15) | (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4;
        float scale = d * (float)(whole - 32);
        const uint8_t *from = q + s / 8 * 32 + s % 2 * 16, *bits = high + s % 2 * 16;
        for (int j = 0; j < 16; j++)
            y[16 * s + j] = scale * (float)((from[j] >> s % 8 / 2 * 2 & 3) - (bits[j] >> s / 2 & 1 ? 0 : 4));
    }
}

/* Q4_K, and Q5_K with the fifth bits in `high`. */
static void q45_k(const uint8_t *b, const uint8_t *high, const uint8_t *q, float *y) {
    const uint8_t *scales = b + 4;
    float d = half_at(b), least = half_at(b + 2);
    for (int s = 0; s < 8; s++) {
        int i = s % 4;
        int size = s < 4 ? scales[i] & 63 : (scales[8 + i] & 15) | (scales[i] >> 2 & 48);
        int low = s < 4 ? scales[4 + i] & 63 : scales[8 + i] >> 4 | (scales[4 + i] >> 2 & 48);
        float scale = d * (float)size, m = least * (float)low;
        const uint8_t *from = q + s / 2 * 32;
        int shift = s % 2 * 4;
        if (high)
            for (int j = 0; j < 32; j++)
                y[32 * s + j] = scale * (float)((from[j] >> shift & 15) | (high[j] >> s & 1) << 4) - m;
        else
            for (int j = 0; j < 32; j++) y[32 * s + j] = scale * (float)(from[j] >> shift & 15) - m;
    }
}

static void q6_k(const uint8_t *b, float *y) {
    const uint8_t *low = b, *high = b + 128;
    float d = half_at(b + 208);
    for (int s = 0; s < 16; s++) {
        float scale = d * (float)(int8_t)b[192 + s];
        const uint8_t *from = low + s / 8 * 64 + s % 4 * 16, *bits = high + s / 8 * 32 + s % 2 * 16;
        int shift = s % 8 / 4 * 4, up = s % 8 / 2 * 2;
        for (int j = 0; j < 16; j++)
            y[16 * s + j] = scale * (float)(((from[j] >> shift & 15) | (bits[j] >> up & 3) << 4) - 32);
    }
}

static void decode_block(int kind, const uint8_t *b, float *y) {
    float d = half_at(b);
    switch (kind) {
    case Q4_0: small_block(b + 2, 0, d, 0.0f, 8, 0, y); break;
    case Q4_1: small_block(b + 4, 0, d, half_at(b + 2), 0, 1, y); break;
    case Q5_0: small_block(b + 6, word_at(b + 2), d, 0.0f, 16, 0, y); break;
    case Q5_1: small_block(b + 8, word_at(b + 4), d, half_at(b + 2), 0, 1, y); break;
    case Q8_0:
        for (int j = 0; j < 32; j++) y[j] = d * (float)(int8_t)b[2 + j];
        break;
    case Q2_K: q2_k(b, y); break;
    case Q3_K: q3_k(b, y); break;
    case Q4_K: q45_k(b, NULL, b + 16, y); break;
    case Q5_K: q45_k(b, b + 16, b + 48, y); break;
    case Q6_K: q6_k(b, y); break;
    }
}

/* The weights and bytes of a block; 0 weights for a type that is not decoded here. */
static void block_of(int kind, int *n, int *n_bytes) {
    static const uint8_t bytes[] = {
        [F32] = 4,   [F16] = 2,   [BF16] = 2,   [Q4_0] = 18,  [Q4_1] = 20,  [Q5_0] = 22,  [Q5_1] = 24,
        [Q8_0] = 34, [Q2_K] = 84, [Q3_K] = 110, [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210,
    };
    *n_bytes = kind >= 0 && kind < (int)sizeof bytes ? bytes[kind] : 0;
    *n = *n_bytes == 0 ? 0 : *n_bytes <= 4 ? 1 : *n_bytes <= 34 ? 32 : 256;
}

/* The scales of a matrix in 8 bits: one for each block of height x width, [blocks downwards][across]. What is unpacked
   begins at (row, column) of the matrix. */
typedef struct {
    const float *scales;
    int is_float, across, height, width, row, column; /* is_float: e4m3, else int8 */
} scaling;

/* A matrix [n_rows][n] in a file's bytes, and where it goes: y [n_rows][n], or the outputs of a matrix from `first` on.
   With heads, the two rope halves of each head's rows are interleaved in the file, as llama.cpp stores them. */
typedef struct {
    const uint8_t *from;
    int kind, n_rows, n, n_heads, first;
    float *y;
    const matrix *to;
    atomic_int next; /* PANEL rows */
    const scaling *scaled; /* in place of kind */
} unpacking;

static void decode_scaled(const unpacking *u, int row, float *y) {
    const scaling *s = u->scaled;
    const uint8_t *b = u->from + (size_t)row * u->n;
    const float *scales = s->scales + (size_t)((s->row + row) / s->height) * s->across;
    for (int i = 0, last; i < u->n; i = last) {
        int block = (s->column + i) / s->width;
        float scale = scales[block];
        last = (block + 1) * s->width - s->column;
        if (last > u->n) last = u->n;
        if (s->is_float)
            for (int j = i; j < last; j++) y[j] = e4m3_of(b[j]) * scale;
        else
            for (int j = i; j < last; j++) y[j] = (float)(int8_t)b[j] * scale;
    }
}

static void decode_row(const unpacking *u, int row, float *y) {
    int n, n_bytes;
    if (u->scaled) {
        decode_scaled(u, row, y);
        return;
    }
    block_of(u->kind, &n, &n_bytes);
    if (u->n_heads) {
        int d = u->n_rows / u->n_heads, at = row % d;
        row += at % (d / 2) * 2 + at / (d / 2) - at;
    }
    const uint8_t *b = u->from + (size_t)row * (u->n / n) * n_bytes;
    const uint16_t *halves = (const uint16_t *)b;
    if (u->kind == F32)
        memcpy(y, b, u->n * sizeof(float));
    else if (u->kind == F16)
        for (int i = 0; i < u->n; i++) y[i] = half_of(halves[i]);
    else if (u->kind == BF16)
        for (int i = 0; i < u->n; i++) y[i] = as_float((uint32_t)halves[i] << 16);
    else
        for (int i = 0; i < u->n; i += n, b += n_bytes) decode_block(u->kind, b, y + i);
}

/* Output `out` of a matrix in int8, from n floats, which are overwritten; room: width bytes. */
static void pack_row(const matrix *to, int out, float *values, int n, int8_t *room) {
    size_t width = to->width;
    int8_t *steps = (int8_t *)to->weights + (size_t)(out / PANEL) * PANEL * width + out % PANEL * TOGETHER;
    turn(values, n, to->mixed);
    ((float *)to->scales)[out] = round_row(values, n, width, 1, 0, room) / sqrtf((float)to->mixed);
    int32_t sum = 0;
    for (size_t i = 0; i < width; i++) sum += room[i];
    ((int32_t *)to->offsets)[out] = -ZERO * sum;
    for (size_t i = 0; i < width; i += TOGETHER) memcpy(steps + i * PANEL, room + i, TOGETHER);
}

static void unpack_part(const member *m, void *arg) {
    unpacking *u = arg;
    const matrix *to = u->to;
    size_t width = to ? to->width : u->n;
    float *room = malloc(width * (sizeof(float) + sizeof(int8_t)));
    int8_t *q = (int8_t *)(room + width);
    (void)m;
    for (int row; (row = atomic_fetch_add(&u->next, 1) * PANEL) < u->n_rows;)
        for (int last = row + PANEL < u->n_rows ? row + PANEL : u->n_rows; row < last; row++) {
            int out = u->first + row;
            size_t at = (size_t)(out / PANEL) * PANEL * width;
            decode_row(u, row, to ? room : u->y + (size_t)row * u->n);
            if (to && to->scales) {
                pack_row(to, out, room, u->n, q);
            } else if (to) {
                float *values = (float *)to->weights + at + out % PANEL;
                memset(room + u->n, 0, (width - u->n) * sizeof(float));
                for (size_t i = 0; i < width; i++) values[i * PANEL] = room[i];
            }
        }
    free(room);
}

/* Decode a stored matrix into y, or else pack it into `to`. Returns 0, and does nothing, for an unknown type. */
int unpack(int n_threads, int kind, const void *from, int n_rows, int n, int n_heads, float *y, const matrix *to,
           int first) {
    int n_block, n_bytes;
    block_of(kind, &n_block, &n_bytes);
    if (!n_block || n % n_block) return 0;
    unpacking u = {from, kind, n_rows, n, n_heads, first, y, to, 0, NULL};
    together(n_rows >= MANY ? n_threads : 1, unpack_part, &u);
    return 1;
}

/* The same for a matrix in 8 bits with scales. */
void unpack_scaled(int n_threads, int is_float, const void *from, int n_rows, int n, const float *scales, int across,
                   int height, int width, int row, int column, float *y, const matrix *to, int first) {
    scaling s = {scales, is_float, across, height, width, row, column};
    unpacking u = {from, 0, n_rows, n, 0, first, y, to, 0, &s};
    together(n_rows >= MANY ? n_threads : 1, unpack_part, &u);
}
