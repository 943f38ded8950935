// One step of all rows of a wide layer, backwards: see wide.cuh; arguments and cells as in adjoint.cu. A launch ends the
// step before, whose product is there, and begins its own; the last one only ends.
#include "wide.cuh"
#include "adjoint_args.cuh"

struct WideAdjointArgs {
  AdjointArgs sweep;
  const float *product;                           // (rows, n): of the operand of the step before
  const float *of_weights;                        // what undoes the scale of split weights
  void *operand;                                  // (rows, COPIES PRODUCTS n): out
  float *scales;                                  // (rows): in and out, what undoes the scale of each row's operand
  float *carried;                                 // (rows, PARTS n): in and out, what passes by the gates
  int step;
};

extern "C" __global__ void __launch_bounds__(THREADS) wide_adjoint(const __grid_constant__ WideAdjointArgs w) {
  const AdjointArgs &a = w.sweep;
  const int n = UNITS, step = w.step;
  const index_t row = blockIdx.x, sequence = a.sequence[row], at = row * (PARTS * n);
  const int begin = (int)a.begin[row], end = (int)a.end[row], walk = end > begin ? a.lead + end - begin : 0;
  if (step > walk) return;
  const int late = end + a.lead - 1, t = late - step, length = a.lead ? (int)a.lengths[sequence] : a.steps;
  const index_t token = (index_t)t * a.batch + sequence;
  const bool steps = step < walk && t < length, stepped = step > 0 && t + 1 < length;
  const bool reset = RESETS && steps && a.resets[token];
  const bool was_reset = RESETS && stepped && a.resets[token + a.batch];
  const bool begins = a.lead && (step == a.lead || walk == 0);
  const float undo = step == 0 ? 0.0f : MODE == 0 ? w.scales[row] * *w.of_weights : 1.0f;
  float operand[LOCAL][PRODUCTS], most = 0.0f;
  EACH_UNIT {
    float grad[PARTS], kept[PARTS], diverted[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {             // the gradient after step t, from what passed by step t + 1
      const index_t own = at + p * n + unit;
      kept[p] = step && DECAY ? a.decay[own] : 1.0f, diverted[p] = step && RESETS ? a.reset_grads[own] : 0.0f;
      if (step > 0) {
        grad[p] = w.carried[own];
        if (stepped) {
          const float shown = DROPPED ? undo * a.mask[sequence * n + unit] : undo;
          const float value = grad[p] + (p == 0 ? w.product[row * n + unit] * shown : 0.0f);
          if (was_reset) diverted[p] += value, kept[p] = 0.0f;
          grad[p] = was_reset ? 0.0f : value;
        }
      } else if (!a.lead) {
        grad[p] = a.starts[own];
      } else {
        grad[p] = late + 1 >= length && a.final ? a.final[sequence * (PARTS * n) + p * n + unit] : 0.0f;
      }
      if (begins) a.starts[own] = grad[p], kept[p] = 1.0f, diverted[p] = 0.0f;
      if (step == walk) a.ends[own] = grad[p];
    }
    float passing[PARTS], keep[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) passing[p] = grad[p], keep[p] = 1.0f;
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) operand[k][q] = 0.0f;
    if (steps) {
      float save[SAVED > 0 ? SAVED : 1], before[PARTS] = {}, after[PARTS] = {}, vectors[VECTORS > 0 ? VECTORS : 1];
      float g[PARTS], grads[GRADS];
#pragma unroll
      for (int i = 0; i < SAVED; i++) save[i] = a.saved[token * (SAVED * n) + i * n + unit];
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        if (HAS(BEFORE, p)) before[p] = a.states[p][token * n + unit];
        if (HAS(BEFORE, p) && reset) before[p] = a.origin[sequence * (PARTS * n) + p * n + unit];
        if (HAS(AFTER, p)) after[p] = a.states[p][(token + a.batch) * n + unit];
        g[p] = grad[p] + (p == 0 && a.incoming ? a.incoming[token * n + unit] : 0.0f);
      }
#pragma unroll
      for (int i = 0; i < VECTORS; i++) vectors[i] = a.vectors[i * n + unit];
      pull(save, before, after, vectors, g, operand[k], grads, passing, keep);
      if (STORES && step >= a.lead)
#pragma unroll
        for (int i = 0; i < GRADS; i++) a.gate_grads[token * (GRADS * n) + i * n + unit] = grads[i];
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const index_t own = at + p * n + unit;
      w.carried[own] = passing[p];
      if (DECAY) a.decay[own] = kept[p] * keep[p];
      if (RESETS) a.reset_grads[own] = diverted[p];
    }
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) most = fmaxf(most, fabsf(operand[k][q]));
  }
  float scale = 1.0f, inverse = 1.0f;
  if (MODE == 0) {
    scale_of(over_block(most), scale, inverse);
    if (threadIdx.x == 0) w.scales[row] = inverse;
  }
  char *const to = (char *)w.operand + row * (COPIES * PRODUCTS * n) * (MODE == 3 ? 4 : 2);
  EACH_UNIT {
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) put_operand<PRODUCTS * UNITS>(to, q * n + unit, operand[k][q], scale);
  }
}
