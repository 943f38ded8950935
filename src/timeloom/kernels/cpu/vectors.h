/* Vectors of float32, the elementary functions of gates, and products in registers. */
#ifndef TIMELOOM_VECTORS_H
#define TIMELOOM_VECTORS_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE 8
#else
#define LANES 8
#define TILE 4
#endif
#define MAX_GATES 4

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define ROLL _Pragma("GCC unroll 1") /* the gates of eight rows unrolled would not fit the instruction cache */

/* ---- elementary functions -------------------------------------------------------------------------------- */

INLINE vec select_vec(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec splat(float x) { return x - (vec){}; } /* x - 0 is x; x + 0 is not, for -0, and costs an addition */
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v)) /* load once: left alone, every product would load its weights again */
#else
#define IN_REGISTER(v)
#endif

#if defined(__AVX512F__)
/* With a NaN these return their second operand, so NaN stays NaN. */
INLINE vec at_least(float low, vec x) { return (vec)_mm512_max_ps(_mm512_set1_ps(low), (__m512)x); }
INLINE vec at_most(float high, vec x) { return (vec)_mm512_min_ps(_mm512_set1_ps(high), (__m512)x); }
INLINE vec round_vec(vec x) { return (vec)_mm512_roundscale_ps((__m512)x, 0); }
INLINE vec times_power_of_two(vec x, vec n) { return (vec)_mm512_scalef_ps((__m512)x, (__m512)n); }
INLINE vec reciprocal(vec x) { /* an estimate good to 14 bits, and one Newton step */
  vec r = (vec)_mm512_rcp14_ps((__m512)x);
  return r + r * (1.0f - x * r);
}
#else
INLINE vec at_least(float low, vec x) { return select_vec(x < low, splat(low), x); }
INLINE vec at_most(float high, vec x) { return select_vec(x > high, splat(high), x); }
INLINE vec round_vec(vec x) { /* adding 1.5 * 2^23 leaves no room for a fraction */
  return (x + 12582912.0f) - 12582912.0f;
}
INLINE vec times_power_of_two(vec x, vec n) { /* -126 <= n <= 127 */
  return x * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}
INLINE vec reciprocal(vec x) { return 1.0f / x; }
#endif

/* exp(x) to about 1 ulp for |x| <= 87, held constant beyond; NaN stays NaN. */
INLINE vec exp_vec(vec x) {
  x = at_most(87.0f, at_least(-87.0f, x));
  vec n = round_vec(x * 1.442695041f);
  vec r = x - n * 0.693359375f; /* ln 2 in two pieces, the first exact in few bits */
  r = r + n * 2.12194440e-4f;
  vec p = splat(1.393374006e-03f); /* Chebyshev fit of (exp(r) - 1 - r) / r^2, error 1e-8 */
  p = p * r + 8.363239950e-03f;
  p = p * r + 4.166646411e-02f;
  p = p * r + 1.666657662e-01f;
  p = p * r + 5.000000014e-01f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return times_power_of_two(p, n);
}

/* Zero, not merely tiny, where torch's is: an infinite state may be multiplied by it. A gate near one is rounded once,
 * as 1 - e / (1 + e): 1 / (1 + e) would round 1 + e first, and what is left of 1 - gate, which gradients are made of,
 * would be off by twice as much. */
INLINE vec sigmoid_vec(vec x) {
  vec e = exp_vec(-x), gate = reciprocal(1.0f + e);
  return select_vec(x < -88.72f, splat(0.0f), select_vec(x > 1.0f, 1.0f - e * gate, gate));
}

/* tanh: an odd series below 0.55 (where the quotient would cancel), the quotient above: of |x|, since that of a negative
 * x is a difference of numbers near 1 and 2, and what is left of 1 - tanh^2 would be off by four times as much. */
INLINE vec tanh_vec(vec x) {
  const ivec sign = (ivec)x & (ivec)splat(-0.0f);
  vec size = (vec)((ivec)x ^ sign);
  vec quotient = 1.0f - 2.0f * reciprocal(exp_vec(size + size) + 1.0f);
  quotient = (vec)((ivec)quotient | sign);
  vec s = x * x;
  vec p = splat(-6.272792019e-03f); /* Chebyshev fit of (tanh(x) - x) / x^3 in x^2, error 1e-9 */
  p = p * s + 2.107039870e-02f;
  p = p * s - 5.385190566e-02f;
  p = p * s + 1.333258083e-01f;
  p = p * s - 3.333331732e-01f;
  vec series = x + x * s * p;
  return select_vec(s < 0.3025f, series, quotient);
}

/* ---- vectors at the ragged edge of n ---------------------------------------------------------------------- */

#if defined(__AVX512F__)
INLINE vec load(const float *p, int lanes) {
  if (lanes >= LANES) return *(const vec *)p;
  return (vec)_mm512_maskz_loadu_ps((__mmask16)((1 << lanes) - 1), p);
}
INLINE void store(float *p, vec v, int lanes) {
  if (lanes >= LANES) { *(vec *)p = v; return; }
  _mm512_mask_storeu_ps(p, (__mmask16)((1 << lanes) - 1), (__m512)v);
}
#else
INLINE vec load(const float *p, int lanes) {
  if (lanes >= LANES) return *(const vec *)p;
  vec v = {};
  for (int i = 0; i < lanes; i++) v[i] = p[i];
  return v;
}
INLINE void store(float *p, vec v, int lanes) {
  if (lanes >= LANES) { *(vec *)p = v; return; }
  for (int i = 0; i < lanes; i++) p[i] = v[i];
}
#endif

/* acc[r][slot g] += sum_k a[r][k] w[k][g][:]; loops over rows and gates are unrolled. The last gate's slot is one
 * further on with `apart`: the GRU's candidate keeps what comes from x apart from what comes from h. */
INLINE void products(const int rows, const int gates, const int apart, long depth, const float *const a[TILE],
                     const float *w, vec acc[TILE][MAX_GATES]) {
  for (long k = 0; k < depth; k++) {
    vec wk[MAX_GATES];
    UNROLL for (int g = 0; g < gates; g++) {
      wk[g] = *(const vec *)(w + (k * gates + g) * LANES);
      IN_REGISTER(wk[g]);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      vec ar = splat(a[r][k]);
      UNROLL for (int g = 0; g < gates; g++) acc[r][apart && g == gates - 1 ? g + 1 : g] += ar * wk[g];
    }
  }
}
INLINE void clear(const int rows, vec acc[TILE][MAX_GATES]) {
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int g = 0; g < MAX_GATES; g++) acc[r][g] = splat(0.0f);
}

/* out[i][:] += sum_k values[k][i] grads[k][:] for `rows` values of i and `vecs` vectors of grads. Summed by itself first:
 * rounding is then that of a short sum and of a sum of sums, not that of one long sum. */
INLINE void sum_tile(const int rows, const int vecs, long tokens, const float *const *values, long i,
                     const float *const *grads, long at, float *out, long stride) {
  vec acc[4][4];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = splat(0.0f);
  for (long k = 0; k < tokens; k++) {
    const float *value = values[k] + i, *grad = grads[k] + at;
    vec gk[4];
    UNROLL for (int v = 0; v < vecs; v++) {
      gk[v] = *(const vec *)(grad + v * LANES);
      IN_REGISTER(gk[v]);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      vec value_r = splat(value[r]);
      UNROLL for (int v = 0; v < vecs; v++) acc[r][v] += value_r * gk[v];
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < vecs; v++) *(vec *)(out + (i + r) * stride + v * LANES) += acc[r][v];
}

/* The same for all i < width and for `columns` columns (whole vectors) of grads from `from` on. */
static void sum_outer(long tokens, const float *const *values, long width, const float *const *grads, long from,
                      long columns, float *out) {
  for (long column = 0; column < columns;) {
    const int vecs = columns - column >= 4 * LANES ? 4 : columns - column >= 2 * LANES ? 2 : 1;
    long i = 0;
#define SUM_ROWS(vecs) \
  for (; i + 4 <= width; i += 4) sum_tile(4, vecs, tokens, values, i, grads, from + column, out + column, columns); \
  for (; i < width; i++) sum_tile(1, vecs, tokens, values, i, grads, from + column, out + column, columns);
    if (vecs == 4) { SUM_ROWS(4) } else if (vecs == 2) { SUM_ROWS(2) } else { SUM_ROWS(1) }
#undef SUM_ROWS
    column += vecs * LANES;
  }
}

#endif
