/* V, a vector of float32 or float64, and the elementary functions that generated pointwise code is made of. */
#ifndef TIMELOOM_ELEMENTS_H
#define TIMELOOM_ELEMENTS_H
#include "vectors.h"

#ifdef TIMELOOM_DOUBLE
typedef double real;
#define WIDE (LANES / 2)
typedef double V __attribute__((vector_size(WIDE * 8), aligned(8)));
typedef int64_t M __attribute__((vector_size(WIDE * 8), aligned(8)));
#else
typedef float real;
#define WIDE LANES
typedef vec V;
typedef ivec M;
#endif

INLINE V v_const(real x) { return x - (V){}; }
INLINE V choose(M mask, V yes, V no) { return (V)(((M)yes & mask) | ((M)no & ~mask)); }
INLINE V v_where(M mask) { return (V)((M)v_const((real)1) & mask); }
INLINE V v_select(V condition, V yes, V no) { return choose(condition != (real)0, yes, no); }
INLINE V v_max(V a, V b) { return choose((a > b) | (a != a), a, b); }
INLINE V v_min(V a, V b) { return choose((a < b) | (a != a), a, b); }
INLINE V v_abs(V a) { return choose(a < (real)0, -a, a + (real)0); }
INLINE V v_sign(V a) { return choose(a != a, a, v_where(a > (real)0) - v_where(a < (real)0)); }

/* Lane by lane: the compiler makes vectors of those that it can. */
#define BY_LANE(name, call) \
  INLINE V v_##name(V x) { \
    V y; \
    for (int i = 0; i < WIDE; i++) y[i] = call; \
    return y; \
  }
#define OF(function) (sizeof(real) == 8 ? function(x[i]) : function##f(x[i]))
BY_LANE(sqrt, OF(__builtin_sqrt))
BY_LANE(floor, OF(__builtin_floor))
BY_LANE(sin, OF(sin))
BY_LANE(cos, OF(cos))
BY_LANE(atan, OF(atan))
BY_LANE(erf, OF(erf))
INLINE V v_rsqrt(V x) { return (real)1 / v_sqrt(x); }
INLINE V v_reciprocal(V x) { return (real)1 / x; }
INLINE V v_pow(V x, V p) {
  V y;
  for (int i = 0; i < WIDE; i++) y[i] = sizeof(real) == 8 ? pow(x[i], p[i]) : powf(x[i], p[i]);
  return y;
}

#ifdef TIMELOOM_DOUBLE
BY_LANE(exp, exp(x[i]))
BY_LANE(expm1, expm1(x[i]))
BY_LANE(log, log(x[i]))
BY_LANE(log1p, log1p(x[i]))
BY_LANE(tanh, tanh(x[i]))
INLINE V v_sigmoid(V x) { return 1.0 / (1.0 + v_exp(-x)); }
#else
INLINE V v_sigmoid(V x) { return sigmoid_vec(x); }
INLINE V v_tanh(V x) { return tanh_vec(x); }

/* 1 + r + r^2 q(r) is exp(r) for |r| <= ln(2) / 2. */
INLINE V exp_rest(V r) {
  V q = splat(1.393374006e-03f);
  q = q * r + 8.363239950e-03f;
  q = q * r + 4.166646411e-02f;
  q = q * r + 1.666657662e-01f;
  return q * r + 5.000000014e-01f;
}
/* exp(x) to about 1 ulp over all of float32, infinite and zero where it is. */
INLINE V v_exp(V x) {
  V held = at_most(110.0f, at_least(-110.0f, x));
  V n = round_vec(held * 1.442695041f);
  V r = held - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = (exp_rest(r) * r + 1.0f) * r + 1.0f;
  V half = round_vec(n * 0.5f);
  return times_power_of_two(times_power_of_two(p, half), n - half);
}
INLINE V v_expm1(V x) {
  V r = at_most(0.35f, at_least(-0.35f, x));
  return choose(v_abs(x) < 0.34f, exp_rest(r) * r * r + r, v_exp(x) - 1.0f);
}
/* log(x): x is m 2^e with m in [sqrt(1/2), sqrt(2)); a Chebyshev fit of (log(1 + f) - f + f^2 / 2) / f^3, error 5e-9. */
INLINE V v_log(V x) {
  M tiny = (x < 1.17549435e-38f) & (x > 0.0f);
  V scaled = choose(tiny, x * 8388608.0f, x);
  ivec bits = (ivec)scaled;
  ivec exponent = ((bits >> 23) & 255) - 127;
  V m = (V)((bits & 0x7fffff) | 0x3f800000);
  M large = m > 1.41421356f;
  m = choose(large, m * 0.5f, m);
  V e = __builtin_convertvector(exponent - large, V); /* a mask is -1 where it holds */
  e = choose(tiny, e - 23.0f, e);
  V f = m - 1.0f;
  V p = splat(-6.201500146e-02f);
  p = p * f + 1.053086477e-01f;
  p = p * f - 1.064619164e-01f;
  p = p * f + 1.103778335e-01f;
  p = p * f - 1.245074332e-01f;
  p = p * f + 1.428652455e-01f;
  p = p * f - 1.666800152e-01f;
  p = p * f + 2.000001004e-01f;
  p = p * f - 2.499999028e-01f;
  p = p * f + 3.333333328e-01f;
  V y = f * f * f * p - 2.12194440e-4f * e - 0.5f * f * f;
  y = (f + y) + 0.693359375f * e;
  y = choose(x == 0.0f, splat(-INFINITY), y);
  y = choose((x < 0.0f) | (x != x), splat(NAN), y);
  return choose(x == INFINITY, x, y);
}
INLINE V v_log1p(V x) { /* what rounding took from 1 + x is given back by the quotient */
  V u = 1.0f + x;
  V y = choose(u == 1.0f, x, v_log(u) * (x / (u - 1.0f)));
  return choose((x > 1e15f) | (u == 0.0f), v_log(u), y);
}
#endif
#ifdef TIMELOOM_DOUBLE
INLINE V v_softplus(V x) { return v_max(x, v_const(0)) + v_log1p(v_exp(-v_abs(x))); }
#else
/* log(1 + e) for e in [0, 1] is 2 artanh(e / (2 + e)), an odd series in s = e / (2 + e) <= 1/3: a Chebyshev fit of
 * (artanh(s) - s) / s^3 in s^2, error 3e-10. */
INLINE V v_softplus(V x) {
  V e = v_exp(-v_abs(x)), s = e / (2.0f + e), q = s * s;
  V p = splat(1.161952527e-01f);
  p = p * q + 1.085165750e-01f;
  p = p * q + 1.429629171e-01f;
  p = p * q + 1.999985068e-01f;
  p = p * q + 3.333333367e-01f;
  return v_max(x, v_const(0)) + 2.0f * (s + s * q * p);
}
#endif

#endif
