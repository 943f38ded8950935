// i, f, o = σ(u + y)   c̃ = tanh(u_g + y_g)   c⁺ = f c + i c̃   h⁺ = o tanh(c⁺)      state: h, c
// ZONED (zoneout): of each part, s⁺ + d (s − s⁺) in place of s⁺; the shares d_h and d_c are two more inputs. What c would
// be is what h is made of.
#pragma once
#include "functions.cuh"
#define PRODUCTS 4
#define INPUTS (4 + 2 * ZONED)
#define PARTS 2
#define SAVED (4 + 2 * ZONED)   // i, f, c̃, o; d_h, d_c
#define VECTORS 0
#define GRADS 4    // of the arguments of the gates
#define BEFORE 2
#define AFTER (ZONED ? 0 : 2)
#define BOUNDED 1

__device__ __forceinline__ void advance(const float *y, const float *u, const float *vectors, const float *state,
                                        float *next, float *saved, float *keep) {
  const float input = sigmoid(u[0] + y[0]), forget = sigmoid(u[1] + y[1]);
  const float candidate = tanh_(u[2] + y[2]), output = sigmoid(u[3] + y[3]);
  next[1] = fmaf(forget, state[1], input * candidate);
  next[0] = output * tanh_(next[1]);
  saved[0] = input, saved[1] = forget, saved[2] = candidate, saved[3] = output;
  keep[0] = 0.0f, keep[1] = forget;
  if (ZONED) {
    for (int p = 0; p < 2; p++) {
      const float kept = saved[SAVED - 2 + p] = u[INPUTS - 2 + p];
      next[p] = fmaf(kept, state[p] - next[p], next[p]);
    }
    keep[1] = fmaf(u[INPUTS - 1], 1.0f - forget, forget);
  }
}

__device__ __forceinline__ void pull(const float *saved, const float *before, const float *after, const float *vectors,
                                     const float *g, float *d_products, float *grads, float *through, float *keep) {
  const float input = saved[0], forget = saved[1], candidate = saved[2], output = saved[3];
  const float passing_h = ZONED ? saved[SAVED - 2] * g[0] : 0.0f, passing_c = ZONED ? saved[SAVED - 1] * g[1] : 0.0f;
  const float by_h = ZONED ? g[0] - passing_h : g[0], by_c = ZONED ? g[1] - passing_c : g[1];
  const float squashed = tanh_(ZONED ? fmaf(forget, before[1], input * candidate) : after[1]);
  const float d_c = fmaf(by_h * output, fmaf(-squashed, squashed, 1.0f), by_c);
  grads[0] = d_c * candidate * input * (1.0f - input);
  grads[1] = d_c * before[1] * forget * (1.0f - forget);
  grads[2] = d_c * input * fmaf(-candidate, candidate, 1.0f);
  grads[3] = by_h * squashed * output * (1.0f - output);
  for (int i = 0; i < 4; i++) d_products[i] = grads[i];
  through[0] = passing_h, through[1] = ZONED ? fmaf(d_c, forget, passing_c) : d_c * forget;
  keep[0] = 0.0f, keep[1] = ZONED ? fmaf(saved[SAVED - 1], 1.0f - forget, forget) : forget;
}
