/* The input rows of products: normalised, and in int8 mixed and rounded. */

#define STEPS 127.0f
#define LEAST 1e-30f /* lower bound of a row's largest value */
#define SMALL 65536  /* weights; fewer run on one thread */
#define MANY 16      /* rows; fewer run on one thread */

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

/* Quantise one row of n, in a buffer of `width` (a multiple of 8): n steps, then zeros, as numbers of `size` bytes with
   `zero` added. Returns the scale. */
UNROLLED float round_row(float *x, int n, int width, const int size, int zero, void *q) {
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
    for (int i = 0; i < width; i += 8) {
        i8 steps = (i8)fma8(*(f8 *)(x + i), to_steps, magic) - (i8)magic + zero;
        if (size == 1)
            *(b8 *)((char *)q + i) = __builtin_convertvector(steps, b8);
        else
            *(h8 *)((int16_t *)q + i) = __builtin_convertvector(steps, h8);
    }
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
   are padded to width: [panel][width][PANEL] in float32, [panel][width / TOGETHER][PANEL][TOGETHER] in int8. */
typedef struct {
    const void *weights;
    const float *scales;    /* [n_out] */
    const int32_t *offsets; /* [panel][PANEL]: see dots.h */
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
        to.scales[row] = round_row(y, n, width, sizeof(input_t), ZERO, (input_t *)to.values + (size_t)row * width) /
                         sqrtf((float)mixed);
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
