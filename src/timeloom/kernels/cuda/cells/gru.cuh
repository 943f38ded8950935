// r = σ(u_r + y_r)   z = σ(u_z + y_z)   M = y_n + b_hn   c = tanh(u_n + r M)   h⁺ = c + z (h − c)
// ZONED (zoneout): s⁺ + d (h − s⁺) in place of s⁺ = h⁺, where d, the share that a unit keeps, is one more input.
#pragma once
#include "functions.cuh"
#define PRODUCTS 3
#define INPUTS (3 + ZONED)
#define PARTS 1
#define SAVED (4 + ZONED)   // r, z, M, c; d
#define VECTORS 1  // b_hn
#define GRADS 4    // of the arguments of σ, σ and tanh, and of M
#define BEFORE 1
#define AFTER 0
#define BOUNDED 1

__device__ __forceinline__ void advance(const float *y, const float *u, const float *vectors, const float *state,
                                        float *next, float *saved, float *keep) {
  const float r = sigmoid(u[0] + y[0]), z = sigmoid(u[1] + y[1]), inner = y[2] + vectors[0];
  const float candidate = tanh_(fmaf(r, inner, u[2]));
  const float following = fmaf(z, state[0] - candidate, candidate), kept = ZONED ? u[INPUTS - 1] : 0.0f;
  next[0] = ZONED ? fmaf(kept, state[0] - following, following) : following;
  saved[0] = r, saved[1] = z, saved[2] = inner, saved[3] = candidate;
  if (ZONED) saved[SAVED - 1] = kept;
  keep[0] = ZONED ? fmaf(kept, 1.0f - z, z) : z;
}

__device__ __forceinline__ void pull(const float *saved, const float *before, const float *after, const float *vectors,
                                     const float *g, float *d_products, float *grads, float *through, float *keep) {
  const float r = saved[0], z = saved[1], inner = saved[2], candidate = saved[3];
  const float kept = ZONED ? saved[SAVED - 1] : 0.0f, passing = ZONED ? kept * g[0] : 0.0f;
  const float by = ZONED ? g[0] - passing : g[0];
  const float d_candidate = by * (1.0f - z) * fmaf(-candidate, candidate, 1.0f);
  const float d_update = by * (before[0] - candidate) * z * (1.0f - z);
  const float d_reset = d_candidate * inner * r * (1.0f - r), d_inner = d_candidate * r;
  d_products[0] = grads[0] = d_reset, d_products[1] = grads[1] = d_update;
  grads[2] = d_candidate, d_products[2] = grads[3] = d_inner;
  through[0] = ZONED ? fmaf(by, z, passing) : by * z;
  keep[0] = ZONED ? fmaf(kept, 1.0f - z, z) : z;
}
