/* Vectors of float32, and the elementary functions of gates. */
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
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define ROLL _Pragma("GCC unroll 1") /* the gates of eight rows unrolled would not fit the instruction cache */

INLINE vec select_vec(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec splat(float x) { return x - (vec){}; } /* x - 0 is x; x + 0 is not, for -0, and costs an addition */
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v)) /* load once: left alone, every product would load its weights again */
#else
#define IN_REGISTER(v)
#endif

#if defined(__AVX512F__)
/* `yes` where x is below, or above, a bound, `no` elsewhere and for NaN. */
INLINE vec where_below(vec x, float bound, vec yes, vec no) {
  return (vec)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_LT_OQ), (__m512)no, (__m512)yes);
}
INLINE vec where_above(vec x, float bound, vec yes, vec no) {
  return (vec)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_GT_OQ), (__m512)no, (__m512)yes);
}
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
INLINE vec where_below(vec x, float bound, vec yes, vec no) { return select_vec(x < bound, yes, no); }
INLINE vec where_above(vec x, float bound, vec yes, vec no) { return select_vec(x > bound, yes, no); }
INLINE vec at_least(float low, vec x) { return where_below(x, low, splat(low), x); }
INLINE vec at_most(float high, vec x) { return where_above(x, high, splat(high), x); }
INLINE vec round_vec(vec x) { /* adding 1.5 * 2^23 leaves no room for a fraction */
  return (x + 12582912.0f) - 12582912.0f;
}
INLINE vec times_power_of_two(vec x, vec n) { /* -126 <= n <= 127 */
  return x * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}
INLINE vec reciprocal(vec x) { return 1.0f / x; }
#endif

/* exp(sign x) to about 1 ulp for |x| <= 87; NaN stays NaN. `sign` is 1 or -1. */
INLINE vec exp_held(const float sign, vec x) {
  vec n = round_vec(x * (sign * 1.442695041f));
  vec r = x - n * (sign * 0.693359375f); /* ln 2 in two pieces, the first exact in few bits */
  r = r + n * (sign * 2.12194440e-4f);
  vec p = splat(1.393374006e-03f); /* Chebyshev fit of (exp(r) - 1 - r) / r^2, error 1e-8 */
  p = sign * (p * r) + 8.363239950e-03f;
  p = sign * (p * r) + 4.166646411e-02f;
  p = sign * (p * r) + 1.666657662e-01f;
  p = sign * (p * r) + 5.000000014e-01f;
  p = sign * (p * r) + 1.0f;
  p = sign * (p * r) + 1.0f;
  return times_power_of_two(p, n);
}

/* Zero, not merely tiny, where torch's is: an infinite state may be multiplied by it. A gate near one is rounded once,
 * as 1 - e / (1 + e): 1 / (1 + e) would round 1 + e first, and what is left of 1 - gate, which gradients are made of,
 * would be off by twice as much. */
INLINE vec sigmoid_vec(vec x) {
  vec e = exp_held(-1.0f, at_most(87.0f, at_least(-87.0f, x)));
  vec gate = where_below(x, -88.72f, splat(0.0f), reciprocal(1.0f + e));
  return where_above(x, 1.0f, 1.0f - e * gate, gate);
}

/* tanh: an odd series below 0.55 (where the quotient would cancel), the quotient above: of |x|, since that of a negative
 * x is a difference of numbers near 1 and 2, and what is left of 1 - tanh^2 would be off by four times as much. */
INLINE vec tanh_vec(vec x) {
  const ivec sign = (ivec)x & (ivec)splat(-0.0f);
  vec size = (vec)((ivec)x ^ sign);
  vec quotient = 1.0f - 2.0f * reciprocal(exp_held(1.0f, at_most(87.0f, size + size)) + 1.0f);
  quotient = (vec)((ivec)quotient | sign);
  vec s = x * x;
  vec p = splat(-6.272792019e-03f); /* Chebyshev fit of (tanh(x) - x) / x^3 in x^2, error 1e-9 */
  p = p * s + 2.107039870e-02f;
  p = p * s - 5.385190566e-02f;
  p = p * s + 1.333258083e-01f;
  p = p * s - 3.333331732e-01f;
  vec series = x + x * s * p;
  return where_below(s, 0.3025f, series, quotient);
}

#endif
