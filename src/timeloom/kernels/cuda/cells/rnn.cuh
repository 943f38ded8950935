// h⁺ = φ(u + y), φ = tanh or relu (RELU). `vectors` holds the diagonal of W_hh, for what a unit keeps of itself.
#pragma once
#include "functions.cuh"
#define PRODUCTS 1
#define INPUTS 1
#define PARTS 1
#define SAVED 0
#define VECTORS 1
#define GRADS 1
#define BEFORE 0
#define AFTER 1
#define BOUNDED (!RELU)

__device__ __forceinline__ float slope(float h) { return RELU ? (h <= 0.0f ? 0.0f : 1.0f) : fmaf(-h, h, 1.0f); }

__device__ __forceinline__ void advance(const float *y, const float *u, const float *vectors, const float *state,
                                        float *next, float *saved, float *keep) {
  const float x = u[0] + y[0];
  next[0] = RELU ? (x <= 0.0f ? 0.0f : x) : tanh_(x);
  keep[0] = slope(next[0]) * vectors[0];
}

__device__ __forceinline__ void pull(const float *saved, const float *before, const float *after, const float *vectors,
                                     const float *g, float *d_products, float *grads, float *through, float *keep) {
  d_products[0] = grads[0] = g[0] * slope(after[0]);
  through[0] = 0.0f;
  keep[0] = slope(after[0]) * vectors[0];
}
