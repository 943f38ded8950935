// Written by `make kernels`; the equations are in compile/builtin.py.
#pragma once
#include "elements.cuh"
#define ZONED 1
#define PRODUCTS 1
#define INPUTS 2
#define PARTS 1
#define SAVED 2
#define VECTORS 1
#define GRADS 1
#define BEFORE 0
#define AFTER 0
#define BOUNDED 1

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v5 = y[0] + u[0];
  const V v6 = v_tanh(v5);
  const V v10 = v_fma(-v6, v6, v_const(1.0));
  const V v11 = vectors[0] * v10;
  const V v13 = state[0] - v6;
  const V v15 = v_fma(u[1], v13, v6);
  const V v16 = v_const(1.0) - v11;
  const V v18 = v_fma(u[1], v16, v11);
  next[0] = v15;
  saved[0] = v6;
  saved[1] = u[1];
  keep[0] = v18;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v5 = v_fma(-saved[0], saved[0], v_const(1.0));
  const V v6 = vectors[0] * v5;
  const V v8 = v_const(1.0) - v6;
  const V v10 = v_fma(saved[1], v8, v6);
  const V v12 = saved[1] * g[0];
  const V v13 = g[0] - v12;
  const V v14 = v5 * v13;
  d_products[0] = v14;
  grads[0] = v14;
  through[0] = v12;
  keep[0] = v10;
}
