// Written by `make kernels`; the equations are in compile/builtin.py.
#pragma once
#include "elements.cuh"
#define ZONED 0
#define PRODUCTS 4
#define INPUTS 4
#define PARTS 2
#define SAVED 4
#define VECTORS 0
#define GRADS 4
#define BEFORE 2
#define AFTER 2
#define BOUNDED 1

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v7 = y[0] + u[0];
  const V v8 = v_sigmoid(v7);
  const V v10 = y[1] + u[1];
  const V v11 = v_sigmoid(v10);
  const V v16 = y[2] + u[2];
  const V v17 = v_tanh(v16);
  const V v13 = y[3] + u[3];
  const V v14 = v_sigmoid(v13);
  const V v19 = v8 * v17;
  const V v20 = v_fma(state[1], v11, v19);
  const V v21 = v_tanh(v20);
  const V v22 = v14 * v21;
  next[0] = v22;
  next[1] = v20;
  saved[0] = v8;
  saved[1] = v11;
  saved[2] = v17;
  saved[3] = v14;
  keep[0] = v_const(0.0);
  keep[1] = v11;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v6 = v_tanh(after[1]);
  const V v9 = v_fma(-v6, v6, v_const(1.0));
  const V v11 = v_fma(-saved[2], saved[2], v_const(1.0));
  const V v12 = v_const(1.0) - saved[3];
  const V v14 = v_const(1.0) - saved[1];
  const V v16 = v_const(1.0) - saved[0];
  const V v20 = v6 * g[0];
  const V v21 = saved[3] * g[0];
  const V v23 = v_fma(v9, v21, g[1]);
  const V v24 = saved[2] * v23;
  const V v25 = saved[0] * v23;
  const V v26 = saved[1] * v23;
  const V v27 = before[1] * v23;
  const V v28 = v11 * v25;
  const V v29 = v20 * saved[3] * v12;
  const V v30 = v27 * saved[1] * v14;
  const V v31 = v24 * saved[0] * v16;
  d_products[0] = v31;
  d_products[1] = v30;
  d_products[2] = v28;
  d_products[3] = v29;
  grads[0] = v31;
  grads[1] = v30;
  grads[2] = v28;
  grads[3] = v29;
  through[0] = v_const(0.0);
  through[1] = v26;
  keep[0] = v_const(0.0);
  keep[1] = saved[1];
}
