// Written by `make kernels`; the equations are in compile/builtin.py.
#pragma once
#include "elements.cuh"
#define ZONED 0
#define PRODUCTS 1
#define INPUTS 1
#define PARTS 1
#define SAVED 0
#define VECTORS 1
#define GRADS 1
#define BEFORE 0
#define AFTER 1
#define BOUNDED 1

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v3 = y[0] + u[0];
  const V v4 = v_tanh(v3);
  const V v8 = v_fma(-v4, v4, v_const(1.0));
  const V v9 = vectors[0] * v8;
  next[0] = v4;
  keep[0] = v9;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v4 = v_fma(-after[0], after[0], v_const(1.0));
  const V v5 = vectors[0] * v4;
  const V v7 = v4 * g[0];
  d_products[0] = v7;
  grads[0] = v7;
  through[0] = v_const(0.0);
  keep[0] = v5;
}
