/* The linear recurrence h[t] = a[t] h[t-1] + b[t] on a CPU, one pass over memory, in float32 and float64.
 *
 * A step costs no more than reading its element, so running the steps in order is as fast as memory allows, and the
 * work is that of matrix-vector products: scans that multiply matrices with matrices do n times as much. Threads share
 * what is independent: units of diagonal elements, sequences of the others.
 *
 * Layouts (row-major): b, h (T, B, n), h0 (B, n); a (T, B, n) diagonal, (T, B, n, n) dense; blocks have b, h (T, B, 2, n)
 * and a (T, B, 2, 2, n). Dense elements may lie in another order: `dense` holds their strides over time, sequences and
 * rows. `reverse` runs from the last step to the first. The readable twin is scan/reference.py.
 */
#ifndef real /* this file includes itself once for each type */
#include <string.h>
#define INLINE static inline __attribute__((always_inline))
#define SHARE 4096 /* elements of one step below which threads cost more than they save */
#define FEW 64     /* units up to which several passes over time are faster than waiting for states to come from memory */
#define real float
#define NAME(name) name##_f32
#include "cpu_scan.c"
#undef real
#undef NAME
#define real double
#define NAME(name) name##_f64
#include "cpu_scan.c"
#else

typedef struct {
  long steps, batch, n, reverse, transpose, dense[3];
  const real *a, *b, *h0;
  const real *added; /* like b, or NULL: dense only, added to the state before it is multiplied */
  real *h;
} NAME(scan_args);

INLINE long NAME(at)(const NAME(scan_args) *s, long k) { return s->reverse ? s->steps - 1 - k : k; }

/* A few units, whose states stay in a register. */
INLINE void NAME(diagonal_few)(const NAME(scan_args) *s, long low, const long count) {
  const long width = s->batch * s->n;
  real state[count];
  memcpy(state, s->h0 + low, sizeof(real) * count);
  for (long k = 0; k < s->steps; k++) {
    const long t = NAME(at)(s, k) * width + low;
    for (long i = 0; i < count; i++) s->h[t + i] = state[i] = s->a[t + i] * state[i] + s->b[t + i];
  }
}

static void NAME(diagonal_part)(const NAME(scan_args) *s, long low, long high) {
  const long width = s->batch * s->n;
  if (high - low <= FEW) {
    for (; low + 16 <= high; low += 16) NAME(diagonal_few)(s, low, 16);
    for (; low + 8 <= high; low += 8) NAME(diagonal_few)(s, low, 8);
    for (; low + 4 <= high; low += 4) NAME(diagonal_few)(s, low, 4);
    for (; low < high; low++) NAME(diagonal_few)(s, low, 1);
    return;
  }
  const real *before = s->h0;
  for (long k = 0; k < s->steps; k++) {
    const long t = NAME(at)(s, k) * width;
    const real *restrict a = s->a + t, *restrict b = s->b + t;
    real *restrict h = s->h + t;
    for (long i = low; i < high; i++) h[i] = a[i] * before[i] + b[i];
    before = h;
  }
}

void NAME(timeloom_scan_diagonal)(const NAME(scan_args) *s, int threads) {
  const long width = s->batch * s->n;
  if (threads <= 1 || width < 64 || width * s->steps < 64 * SHARE) {
    NAME(diagonal_part)(s, 0, width);
    return;
  }
#pragma omp parallel for num_threads(threads)
  for (int i = 0; i < threads; i++) NAME(diagonal_part)(s, width * i / threads, width * (i + 1) / threads);
}

INLINE void NAME(dense_step)(const long n, const long row, const real *restrict a, const real *restrict b, const real *restrict before,
                       real *restrict h) {
  for (long i = 0; i < n; i++) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < n; j++) sum += a[i * row + j] * before[j];
    h[i] = sum + b[i];
  }
}

INLINE void NAME(dense_step_transposed)(const long n, const long row, const real *restrict a, const real *restrict b,
                                  const real *restrict before, real *restrict h) {
  memcpy(h, b, sizeof(real) * n);
  long i = 0;
  for (; i + 4 <= n; i += 4) {
    const real *r0 = a + i * row, *r1 = r0 + row, *r2 = r1 + row, *r3 = r2 + row;
    const real x0 = before[i], x1 = before[i + 1], x2 = before[i + 2], x3 = before[i + 3];
#pragma omp simd
    for (long j = 0; j < n; j++) h[j] += (x0 * r0[j] + x1 * r1[j]) + (x2 * r2[j] + x3 * r3[j]);
  }
  for (; i < n; i++) {
    const real x = before[i];
#pragma omp simd
    for (long j = 0; j < n; j++) h[j] += x * a[i * row + j];
  }
}

INLINE void NAME(dense_sequence)(const NAME(scan_args) *s, long sequence, const long n) {
  const real *before = s->h0 + sequence * n;
  real sum[n];
  for (long k = 0; k < s->steps; k++) {
    const long t = NAME(at)(s, k), token = t * s->batch + sequence;
    const real *a = s->a + t * s->dense[0] + sequence * s->dense[1], *b = s->b + token * n;
    real *h = s->h + token * n;
    if (s->added) {
      for (long i = 0; i < n; i++) sum[i] = before[i] + s->added[token * n + i];
      before = sum;
    }
    if (s->transpose)
      NAME(dense_step_transposed)(n, s->dense[2], a, b, before, h);
    else
      NAME(dense_step)(n, s->dense[2], a, b, before, h);
    before = h;
  }
}

void NAME(timeloom_scan_dense)(const NAME(scan_args) *s, int threads) {
  const long n = s->n, batch = s->batch;
#pragma omp parallel for num_threads(threads) if (threads > 1 && batch > 1 && batch * n * n * s->steps > 64 * SHARE)
  for (long row = 0; row < batch; row++) {
    switch (n) { /* sizes that the compiler unrolls */
      case 2: NAME(dense_sequence)(s, row, 2); break;
      case 4: NAME(dense_sequence)(s, row, 4); break;
      case 8: NAME(dense_sequence)(s, row, 8); break;
      case 16: NAME(dense_sequence)(s, row, 16); break;
      case 32: NAME(dense_sequence)(s, row, 32); break;
      default: NAME(dense_sequence)(s, row, n);
    }
  }
}

void NAME(timeloom_scan_block)(const NAME(scan_args) *s, int threads) {
  const long n = s->n, batch = s->batch;
  const long up = s->transpose ? 2 : 1, down = s->transpose ? 1 : 2; /* where a[0][1] and a[1][0] stand */
#pragma omp parallel for num_threads(threads) if (threads > 1 && batch > 1 && batch * n * s->steps > 64 * SHARE)
  for (long row = 0; row < batch; row++) {
    const real *before = s->h0 + row * 2 * n;
    for (long k = 0; k < s->steps; k++) {
      const long t = NAME(at)(s, k) * batch + row;
      const real *restrict a = s->a + t * 4 * n, *restrict b = s->b + t * 2 * n;
      real *restrict h = s->h + t * 2 * n;
      for (long i = 0; i < n; i++) {
        h[i] = a[i] * before[i] + a[up * n + i] * before[n + i] + b[i];
        h[n + i] = a[down * n + i] * before[i] + a[3 * n + i] * before[n + i] + b[n + i];
      }
      before = h;
    }
  }
}
#endif
