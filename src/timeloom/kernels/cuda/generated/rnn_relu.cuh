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
#define BOUNDED 0

INLINE void advance(const V *y, const V *u, const V *vectors, const V *state, V *next, V *saved, V *keep) {
  const V v3 = y[0] + u[0];
  const V v4 = v_select(v_where(v3 <= v_const(0)), v_const(0), v3);
  const V v7 = v_where(v4 <= v_const(0.0));
  const V v8 = v_select(v7, v_const(0.0), vectors[0]);
  next[0] = v4;
  keep[0] = v8;
}

INLINE void pull(const V *saved, const V *before, const V *after, const V *vectors, const V *g,
                 V *d_products, V *grads, V *through, V *keep) {
  const V v3 = v_where(after[0] <= v_const(0.0));
  const V v4 = v_select(v3, v_const(0.0), vectors[0]);
  const V v6 = v_select(v3, v_const(0.0), g[0]);
  d_products[0] = v6;
  grads[0] = v6;
  through[0] = v_const(0.0);
  keep[0] = v4;
}
