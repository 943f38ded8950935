// One step of all rows of a wide layer, forward: see wide.cuh; arguments and cells as in forward.cu.
#include "wide.cuh"
#include "forward_args.cuh"

struct WideForwardArgs {
  ForwardArgs sweep;
  const float *product;                           // (rows, PRODUCTS n): of the operand before this step
  const float *of_weights;                        // what undoes the scale of split weights
  void *operand;                                  // (rows, COPIES n): out
  float *scales;                                  // (rows): in and out, what undoes the scale of each row's operand
  float *carried;                                 // (rows, PARTS n): in and out
  int step;                                       // -1: rows are entered
};

extern "C" __global__ void __launch_bounds__(THREADS) wide_forward(const __grid_constant__ WideForwardArgs w) {
  const ForwardArgs &a = w.sweep;
  const int n = UNITS, step = w.step;
  const index_t row = blockIdx.x, sequence = a.sequence[row], at = row * (PARTS * n);
  const int length = (int)(a.end[row] - a.begin[row]), first = (int)a.begin[row] - a.lead;
  const int walk = length > 0 ? a.lead + length : 0;
  if (step >= walk && step >= 0) return;
  const index_t token = ((index_t)first + step) * a.batch + sequence;
  const float *const origin = a.origin + sequence * (PARTS * n);
  const bool steps = step >= 0 && first + step >= 0, begins = a.lead && (step + 1 == a.lead || walk == 0);
  const bool resets = RESETS && step + 1 < walk && first + step + 1 >= 0 && a.resets[token + a.batch];
  const float undo = step < 0 ? 0.0f : MODE == 0 ? w.scales[row] * *w.of_weights : 1.0f;
  float operand[LOCAL], most = 0.0f;
  EACH_UNIT {
    float state[PARTS], next[PARTS], keep[PARTS] = {};
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      next[p] = state[p] = step >= 0 ? w.carried[at + p * n + unit] : (a.lead ? origin : a.starts + at)[p * n + unit];
    if (steps) {
      float y[PRODUCTS], u[INPUTS], vectors[VECTORS > 0 ? VECTORS : 1], save[SAVED > 0 ? SAVED : 1];
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++) y[q] = w.product[row * (PRODUCTS * n) + q * n + unit] * undo;
#pragma unroll
      for (int i = 0; i < INPUTS; i++) u[i] = a.inputs[token * (ROW * n) + PLACE(i) * n + unit];
#pragma unroll
      for (int i = 0; i < VECTORS; i++) vectors[i] = a.vectors[i * n + unit];
      advance(y, u, vectors, state, next, save, keep);
      if (STORES && step >= a.lead) {
#pragma unroll
        for (int p = 0; p < PARTS; p++) a.states[p][(token + a.batch) * n + unit] = next[p];
        if (STORES > 1)
#pragma unroll
          for (int i = 0; i < SAVED; i++) a.saved[token * (SAVED * n) + i * n + unit] = save[i];
      }
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const index_t own = at + p * n + unit;
      if (begins) a.starts[own] = next[p];
      if (step < 0 || step + 1 == walk) a.ends[own] = next[p];
      if (DECAY) {
        float kept = step < 0 || begins ? 1.0f : a.decay[own];
        if (steps && !begins) kept *= keep[p];
        a.decay[own] = resets ? 0.0f : kept;
      }
      w.carried[own] = resets ? origin[p * n + unit] : next[p];
    }
    operand[k] = resets ? origin[unit] : next[0];
    if (DROPPED) operand[k] *= a.mask[sequence * n + unit];
    most = fmaxf(most, fabsf(operand[k]));
  }
  float scale = 1.0f, inverse = 1.0f;
  if (MODE == 0) {
    scale_of(over_block(most), scale, inverse);
    if (threadIdx.x == 0) w.scales[row] = inverse;
  }
  char *const to = (char *)w.operand + row * (COPIES * n) * (MODE == 3 ? 4 : 2);
  EACH_UNIT put_operand<UNITS>(to, unit, operand[k], scale);
}
