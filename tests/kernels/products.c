/* Products of cpu.c against plain loops, for the instruction set that this is compiled for: exact in int8, near in float32,
   and the same bits for any number of rows and threads. Prints TOGETHER. */

#include <stdio.h>

#include "../../saguaro/kernels/c/cpu.c"

#define MOST 40 /* rows */
#define CHECK(condition, ...)                                                                                          \
    if (!(condition)) {                                                                                                \
        printf(__VA_ARGS__);                                                                                           \
        exit(1);                                                                                                       \
    }

static uint32_t state = 1;

static float any(void) { return (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f; }

static float *some(size_t n) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = any();
    return x;
}

static void check_int8(const matrix *w, const void *values, const float *scales, int row, const float *y) {
    const input_t *q = (const input_t *)values + (size_t)row * w->width;
    const int8_t *steps = w->weights;
    for (int out = 0; out < w->n_out; out++) {
        int64_t sum = 0;
        for (int i = 0; i < w->width; i++) {
            size_t at = ((size_t)out / PANEL * (w->width / TOGETHER) + i / TOGETHER) * PANEL + out % PANEL;
            sum += ((int64_t)q[i] - ZERO) * steps[at * TOGETHER + i % TOGETHER];
        }
        float expected = (float)sum * (scales[row] * w->scales[out]);
        CHECK(y[out] == expected, "int8 %d x %d, row %d, output %d: %g, not %g\n", w->n_in, w->n_out, row, out, y[out],
              expected)
    }
}

static void check_float(const matrix *w, const float *weights, const float *x, int row, const float *y) {
    for (int out = 0; out < w->n_out; out++) {
        double sum = 0.0, size = 1e-6;
        for (int i = 0; i < w->n_in; i++) {
            double one = (double)weights[(size_t)out * w->n_in + i] * x[(size_t)row * w->n_in + i];
            sum += one;
            size += fabs(one);
        }
        CHECK(fabs(y[out] - sum) <= 1e-6 * size, "float32 %d x %d, row %d, output %d: %g, not %g\n", w->n_in, w->n_out,
              row, out, y[out], sum)
    }
}

static void check(int n_in, int n_out, int mixed, int is_int8) {
    int width = (n_in + 31) / 32 * 32, n_panels = (n_out + PANEL - 1) / PANEL;
    float *weights = some((size_t)n_out * n_in), *x = some((size_t)MOST * n_in);
    matrix w = {calloc((size_t)n_panels * PANEL * width, is_int8 ? 1 : 4), is_int8 ? calloc(n_out, 4) : NULL,
                is_int8 ? calloc(n_panels * PANEL, 4) : NULL, n_in, width, mixed, n_out};
    unpack(2, F32, weights, n_out, n_in, 0, NULL, &w, 0);
    void *values = malloc((size_t)MOST * width * 4);
    size_t n_bytes = n_out * sizeof(float);
    float scales[MOST], *y = malloc(MOST * n_bytes), *first = malloc(MOST * n_bytes); /* each row as it was first */
    int n_checked = 0;
    for (int n = 1; n <= MOST; n += n < 20 ? 1 : 10)
        for (int n_threads = 1; n_threads <= 2; n_threads++) {
            prepare_rows(n_threads, x, n, n_in, mixed, NULL, 0.0f, width, values, is_int8 ? scales : NULL);
            read_rows(n_threads, &w, values, is_int8 ? scales : NULL, n, NULL, NULL, y);
            for (int row = 0; row < n; row++) {
                const float *found = y + (size_t)row * n_out;
                float *known = first + (size_t)row * n_out;
                if (row < n_checked) {
                    CHECK(!memcmp(known, found, n_bytes), "%d x %d: other bits in %d rows\n", n_in, n_out, n)
                    continue;
                }
                if (is_int8)
                    check_int8(&w, values, scales, row, found);
                else
                    check_float(&w, weights, x, row, found);
                memcpy(known, found, n_bytes);
            }
            n_checked = n > n_checked ? n : n_checked;
        }
    free(weights), free(x), free(values), free(y), free(first);
    free((void *)w.weights), free((void *)w.scales), free((void *)w.offsets);
}

int main(void) {
    for (int is_int8 = 0; is_int8 < 2; is_int8++) {
        check(576, 960, 64, is_int8); /* enough weights for several threads */
        check(1536, 64, 128, is_int8);
        check(99, 33, 1, is_int8);
        check(8, 1, 8, is_int8);
    }
    printf("%d\n", TOGETHER);
}
