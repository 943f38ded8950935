// V, one float, and the elementary functions that generated pointwise code is made of: see compile/pointwise.py.
#pragma once
#include "functions.cuh"
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#define INLINE __device__ __forceinline__
typedef float V;

INLINE V v_const(double x) { return (float)x; }
INLINE V v_fma(V a, V b, V c) { return fmaf(a, b, c); }
INLINE V v_where(bool holds) { return holds ? 1.0f : 0.0f; }
INLINE V v_select(V condition, V yes, V no) { return condition != 0.0f ? yes : no; }
INLINE V v_max(V a, V b) { return a > b || a != a ? a : b; }
INLINE V v_min(V a, V b) { return a < b || a != a ? a : b; }
INLINE V v_abs(V a) { return fabsf(a); }
INLINE V v_sign(V a) { return a != a ? a : v_where(a > 0.0f) - v_where(a < 0.0f); }
INLINE V v_sqrt(V x) { return sqrtf(x); }
INLINE V v_rsqrt(V x) { return rsqrtf(x); }
INLINE V v_reciprocal(V x) { return 1.0f / x; }
INLINE V v_floor(V x) { return floorf(x); }
INLINE V v_pow(V x, V p) { return powf(x, p); }
INLINE V v_exp(V x) { return expf(x); }
INLINE V v_expm1(V x) { return expm1f(x); }
INLINE V v_log(V x) { return logf(x); }
INLINE V v_log1p(V x) { return log1pf(x); }
INLINE V v_sin(V x) { return sinf(x); }
INLINE V v_cos(V x) { return cosf(x); }
INLINE V v_atan(V x) { return atanf(x); }
INLINE V v_erf(V x) { return erff(x); }
INLINE V v_sigmoid(V x) { return sigmoid(x); }
INLINE V v_tanh(V x) { return tanh_(x); }
INLINE V v_softplus(V x) { return v_max(x, 0.0f) + log1pf(expf(-fabsf(x))); }
