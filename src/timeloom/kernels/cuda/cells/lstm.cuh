// i, f, o = σ(u + y)   c̃ = tanh(u_g + y_g)   c⁺ = f c + i c̃   h⁺ = o tanh(c⁺)      state: h, c
#pragma once
#include "functions.cuh"
#define PRODUCTS 4
#define INPUTS 4
#define PARTS 2
#define SAVED 4    // i, f, c̃, o
#define VECTORS 0
#define GRADS 4    // of the arguments of the gates
#define BEFORE 2
#define AFTER 2
#define BOUNDED 1

__device__ __forceinline__ void advance(const float *y, const float *u, const float *vectors, const float *state,
                                        float *next, float *saved, float *keep) {
  const float input = sigmoid(u[0] + y[0]), forget = sigmoid(u[1] + y[1]);
  const float candidate = tanh_(u[2] + y[2]), output = sigmoid(u[3] + y[3]);
  next[1] = fmaf(forget, state[1], input * candidate);
  next[0] = output * tanh_(next[1]);
  saved[0] = input, saved[1] = forget, saved[2] = candidate, saved[3] = output;
  keep[0] = 0.0f, keep[1] = forget;
}

__device__ __forceinline__ void pull(const float *saved, const float *before, const float *after, const float *vectors,
                                     const float *g, float *d_products, float *grads, float *through, float *keep) {
  const float input = saved[0], forget = saved[1], candidate = saved[2], output = saved[3];
  const float squashed = tanh_(after[1]);
  const float d_c = fmaf(g[0] * output, fmaf(-squashed, squashed, 1.0f), g[1]);
  grads[0] = d_c * candidate * input * (1.0f - input);
  grads[1] = d_c * before[1] * forget * (1.0f - forget);
  grads[2] = d_c * input * fmaf(-candidate, candidate, 1.0f);
  grads[3] = g[0] * squashed * output * (1.0f - output);
  for (int i = 0; i < 4; i++) d_products[i] = grads[i];
  through[0] = 0.0f, through[1] = d_c * forget;
  keep[0] = 0.0f, keep[1] = forget;
}
