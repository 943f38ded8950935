// Written by `make kernels`; the equations are in compile/builtin.py.
#pragma once
#include "elements.cuh"
#define ZONED 1
#define PRODUCTS 4
#define INPUTS 6
#define PARTS 2
#define SAVED 6
#define VECTORS 0
#define GRADS 4
#define BEFORE 2
#define AFTER 0
#define BOUNDED 1

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v9 = y[0] + u[0];
  const V v10 = v_sigmoid(v9);
  const V v12 = y[1] + u[1];
  const V v13 = v_sigmoid(v12);
  const V v18 = y[2] + u[2];
  const V v19 = v_tanh(v18);
  const V v15 = y[3] + u[3];
  const V v16 = v_sigmoid(v15);
  const V v21 = v10 * v19;
  const V v22 = v_fma(state[1], v13, v21);
  const V v23 = v_tanh(v22);
  const V v24 = v16 * v23;
  const V v26 = state[0] - v24;
  const V v28 = v_fma(u[4], v26, v24);
  const V v30 = state[1] - v22;
  const V v32 = v_fma(u[5], v30, v22);
  const V v51 = v_const(1.0) - v13;
  const V v65 = v_fma(u[5], v51, v13);
  next[0] = v28;
  next[1] = v32;
  saved[0] = v10;
  saved[1] = v13;
  saved[2] = v19;
  saved[3] = v16;
  saved[4] = u[4];
  saved[5] = u[5];
  keep[0] = v_const(0.0);
  keep[1] = v65;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v7 = saved[0] * saved[2];
  const V v8 = v_fma(before[1], saved[1], v7);
  const V v9 = v_tanh(v8);
  const V v14 = v_fma(-v9, v9, v_const(1.0));
  const V v16 = v_fma(-saved[2], saved[2], v_const(1.0));
  const V v17 = v_const(1.0) - saved[3];
  const V v19 = v_const(1.0) - saved[1];
  const V v21 = v_const(1.0) - saved[0];
  const V v24 = v_fma(saved[5], v19, saved[1]);
  const V v27 = saved[5] * g[1];
  const V v28 = g[1] - v27;
  const V v29 = saved[4] * g[0];
  const V v30 = g[0] - v29;
  const V v31 = v9 * v30;
  const V v32 = saved[3] * v30;
  const V v34 = v_fma(v14, v32, v28);
  const V v35 = saved[2] * v34;
  const V v36 = saved[0] * v34;
  const V v38 = before[1] * v34;
  const V v39 = v_fma(saved[1], v34, v27);
  const V v40 = v16 * v36;
  const V v41 = v31 * saved[3] * v17;
  const V v42 = v38 * saved[1] * v19;
  const V v43 = v35 * saved[0] * v21;
  d_products[0] = v43;
  d_products[1] = v42;
  d_products[2] = v40;
  d_products[3] = v41;
  grads[0] = v43;
  grads[1] = v42;
  grads[2] = v40;
  grads[3] = v41;
  through[0] = v29;
  through[1] = v39;
  keep[0] = v_const(0.0);
  keep[1] = v24;
}
