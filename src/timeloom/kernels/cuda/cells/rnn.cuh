// h⁺ = φ(u + y), φ = tanh or relu (RELU). `vectors` holds the diagonal of W_hh, for what a unit keeps of itself.
// ZONED (zoneout): φ + d (h − φ); the share d is one more input.
#pragma once
#include "functions.cuh"
#define PRODUCTS 1
#define INPUTS (1 + ZONED)
#define PARTS 1
#define SAVED (2 * ZONED)  // φ, d
#define VECTORS 1
#define GRADS 1
#define BEFORE 0
#define AFTER (ZONED ? 0 : 1)
#define BOUNDED (!RELU)

__device__ __forceinline__ float slope(float h) { return RELU ? (h <= 0.0f ? 0.0f : 1.0f) : fmaf(-h, h, 1.0f); }

__device__ __forceinline__ void advance(const float *y, const float *u, const float *vectors, const float *state,
                                        float *next, float *saved, float *keep) {
  const float x = u[0] + y[0];
  next[0] = RELU ? (x <= 0.0f ? 0.0f : x) : tanh_(x);
  keep[0] = slope(next[0]) * vectors[0];
  if (ZONED) {
    const float kept = u[INPUTS - 1];
    saved[0] = next[0], saved[SAVED - 1] = kept;
    next[0] = fmaf(kept, state[0] - next[0], next[0]), keep[0] = fmaf(kept, 1.0f - keep[0], keep[0]);
  }
}

__device__ __forceinline__ void pull(const float *saved, const float *before, const float *after, const float *vectors,
                                     const float *g, float *d_products, float *grads, float *through, float *keep) {
  const float kept = ZONED ? saved[SAVED - 1] : 0.0f, through_it = slope(ZONED ? saved[0] : after[0]);
  through[0] = ZONED ? kept * g[0] : 0.0f;
  d_products[0] = grads[0] = (ZONED ? g[0] - through[0] : g[0]) * through_it;
  keep[0] = through_it * vectors[0];
  if (ZONED) keep[0] = fmaf(kept, 1.0f - keep[0], keep[0]);
}
