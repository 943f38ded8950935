// Written by `make kernels`; the equations are in compile/builtin.py.
#pragma once
#include "elements.cuh"
#define ZONED 0
#define PRODUCTS 3
#define INPUTS 3
#define PARTS 1
#define SAVED 4
#define VECTORS 1
#define GRADS 4
#define BEFORE 1
#define AFTER 0
#define BOUNDED 1

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v5 = y[0] + u[0];
  const V v6 = v_sigmoid(v5);
  const V v8 = y[1] + u[1];
  const V v9 = v_sigmoid(v8);
  const V v11 = y[2] + vectors[0];
  const V v14 = v_fma(v6, v11, u[2]);
  const V v15 = v_tanh(v14);
  const V v16 = state[0] - v15;
  const V v18 = v_fma(v9, v16, v15);
  next[0] = v18;
  saved[0] = v6;
  saved[1] = v9;
  saved[2] = v11;
  saved[3] = v15;
  keep[0] = v9;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v5 = before[0] - saved[3];
  const V v7 = v_const(1.0) - saved[1];
  const V v9 = v_fma(-saved[3], saved[3], v_const(1.0));
  const V v11 = v_const(1.0) - saved[0];
  const V v14 = v5 * g[0];
  const V v15 = saved[1] * g[0];
  const V v16 = v7 * g[0];
  const V v17 = v9 * v16;
  const V v18 = saved[2] * v17;
  const V v19 = saved[0] * v17;
  const V v20 = v14 * saved[1] * v7;
  const V v21 = v18 * saved[0] * v11;
  d_products[0] = v21;
  d_products[1] = v20;
  d_products[2] = v19;
  grads[0] = v21;
  grads[1] = v20;
  grads[2] = v17;
  grads[3] = v19;
  through[0] = v15;
  keep[0] = saved[1];
}
