// Written by `make kernels`; the equations are in compile/builtin.py.
#pragma once
#include "elements.cuh"
#define ZONED 1
#define PRODUCTS 3
#define INPUTS 4
#define PARTS 1
#define SAVED 5
#define VECTORS 1
#define GRADS 4
#define BEFORE 1
#define AFTER 0
#define BOUNDED 1

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v7 = y[0] + u[0];
  const V v8 = v_sigmoid(v7);
  const V v10 = y[1] + u[1];
  const V v11 = v_sigmoid(v10);
  const V v13 = y[2] + vectors[0];
  const V v16 = v_fma(v8, v13, u[2]);
  const V v17 = v_tanh(v16);
  const V v18 = state[0] - v17;
  const V v20 = v_fma(v11, v18, v17);
  const V v22 = state[0] - v20;
  const V v24 = v_fma(u[3], v22, v20);
  const V v31 = v_const(1.0) - v11;
  const V v33 = v_fma(u[3], v31, v11);
  next[0] = v24;
  saved[0] = v8;
  saved[1] = v11;
  saved[2] = v13;
  saved[3] = v17;
  saved[4] = u[3];
  keep[0] = v33;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v6 = before[0] - saved[3];
  const V v9 = v_const(1.0) - saved[1];
  const V v11 = v_fma(saved[4], v9, saved[1]);
  const V v13 = v_fma(-saved[3], saved[3], v_const(1.0));
  const V v15 = v_const(1.0) - saved[0];
  const V v18 = saved[4] * g[0];
  const V v19 = g[0] - v18;
  const V v20 = v6 * v19;
  const V v22 = v_fma(saved[1], v19, v18);
  const V v23 = v9 * v19;
  const V v24 = v13 * v23;
  const V v25 = saved[2] * v24;
  const V v26 = saved[0] * v24;
  const V v27 = v20 * saved[1] * v9;
  const V v28 = v25 * saved[0] * v15;
  d_products[0] = v28;
  d_products[1] = v27;
  d_products[2] = v26;
  grads[0] = v28;
  grads[1] = v27;
  grads[2] = v24;
  grads[3] = v26;
  through[0] = v22;
  keep[0] = v11;
}
