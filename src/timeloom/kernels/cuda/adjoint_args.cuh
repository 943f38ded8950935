// What an adjoint sweep is given, and what each of its steps reads.
#pragma once
#include "cell.cuh"
typedef long long index_t;

struct AdjointArgs {
  const float *saved;                             // (T, B, SAVED n)
  const float *states[2];                         // (T + 1, B, n) each
  const float *incoming;                          // (T, B, n) or NULL: the loss's gradient on part 0 after every step
  const float *weights;                           // (PRODUCTS n, n); for tiles of rows, each n x n matrix transposed
  const float *vectors;                           // (VECTORS, n)
  const float *mask;                              // (B, n), if DROPPED
  const float *origin;                            // (B, PARTS n): the state that resets put back
  const float *final;                             // (B, PARTS n) or NULL (zero): with a lead, the gradient where a sequence ends
  float *starts;                                  // (rows, PARTS n): gradients at the end of each row: in; with a lead out
  float *ends;                                    // (rows, PARTS n): out, gradients at its begin
  float *decay;                                   // (rows, PARTS n), if DECAY
  float *gate_grads;                              // (T, B, GRADS n), if STORES
  float *reset_grads;                             // (rows, PARTS n), if RESETS: what flowed into resets
  const index_t *sequence, *begin, *end, *lengths;  // (rows), and (B): where sequences end
  const unsigned char *resets;                    // (T, B), if RESETS
  const float *unless;                            // a certificate or NULL: nothing is swept where it is within its limit
  int steps, batch, rows, lead;
  float limit;
};

#define HAS(bits, part) ((bits) >> (part) & 1)
#define BEFORES (HAS(BEFORE, 0) + HAS(BEFORE, 1))
#define AFTERS (HAS(AFTER, 0) + HAS(AFTER, 1))
#define STREAMS (SAVED + BEFORES + AFTERS + 1)    // vectors that a step reads; the last one is what comes in
