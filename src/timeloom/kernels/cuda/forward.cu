// A forward sweep: all states of every row, step by step. The readable twin is kernels/reference.py.
//
// The cell gives PRODUCTS, INPUTS, PARTS, SAVED, VECTORS and `advance`. BOUNDED says that no state leaves the box of
// max(1, |first state|), so that one power of two does for all steps; else every step finds its own.
#include "rows.cuh"
#include "forward_args.cuh"

#define INPUT_ROW RING_ROW(INPUTS)
#define STATE_ROW OPERAND_ROW(1)
#define OPERAND_BYTES (2 * ROWS * STATE_ROW * 2)
#define RING_BYTES (RING * ROWS * INPUT_ROW * 4)

struct Inputs {                                   // this thread's share of the copies
  const float *from;
  float *ring;
  int first, walk;
  __device__ __forceinline__ Inputs(const ForwardArgs &a, float *ring, int walk) : ring(ring), walk(walk) {
    const int row = blockIdx.x * ROWS + copied_row();
    const bool there = row < a.rows && a.end[row] > a.begin[row];
    first = there ? (int)a.begin[row] - a.lead : a.steps;
    from = there ? a.inputs + ((index_t)first * a.batch + a.sequence[row]) * ROW * UNITS : a.inputs;
  }
  __device__ __forceinline__ void fetch(const ForwardArgs &a, int step) {
    if (step < walk && (unsigned)(first + step) < (unsigned)a.steps) {
      float *to = ring + (step % RING * ROWS + copied_row()) * INPUT_ROW;
#pragma unroll
      for (int i = 0; i < INPUTS; i++) copy_vector(to + i * N, from + PLACE(i) * UNITS);
    }
    from += (index_t)a.batch * ROW * UNITS;
    copies_end();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) forward(const __grid_constant__ ForwardArgs a) {
  if (a.unless && *a.unless <= a.limit) return;   // a NaN is not
  extern __shared__ __align__(16) unsigned char shared[];
  float *const ring = (float *)(shared + OPERAND_BYTES);          // [RING][ROWS][INPUT_ROW]; units beyond n stay zero
  float *const scales = (float *)(shared + OPERAND_BYTES + RING_BYTES);   // [2][WARPS][ROWS]
  const Lane lane;
  const Operand operand((half_bits *)shared, STATE_ROW, lane);    // [2][ROWS][STATE_ROW]
  const int n = UNITS, walk = a.lead + longest_row(a.begin, a.end, lane.row0, a.rows);
  clear_shared(shared, OPERAND_BYTES + RING_BYTES + 2 * WARPS * ROWS * 4);
  meet();
  Inputs inputs(a, ring, walk);
  if (!COPIER || threadIdx.x >= 32 * WARPS)
#pragma unroll 1
    for (int step = 0; step < RING - 1; step++) inputs.fetch(a, step);
  if (threadIdx.x >= 32 * WARPS) {
    if (BOUNDED) meet();
#pragma unroll 1
    for (int step = 0; step < walk; step++) {
      wait_for_copies<RING - 2>();
      meet();
      inputs.fetch(a, step + RING - 1);
    }
    return;
  }

  Weights w[PRODUCTS][SLABS];
#pragma unroll
  for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
    for (int j = 0; j < SLABS; j++) load_weights(w[q][j], lane, j, a.weights + q * n * n);
  float vectors[2][VECTORS > 0 ? VECTORS : 1];
#pragma unroll
  for (int i = 0; i < 2 * VECTORS; i++) {
    const int unit = lane.unit + 8 * (i % 2);
    vectors[i % 2][i / 2] = unit < n ? a.vectors[(i / 2) * n + unit] : 0.0f;
  }

  // The two rows of this lane: row i steps at time first + step, while that is inside 0 ... last - 1.
  int first[2], last[2], sequence[2];
  float *to_states[2][PARTS], *to_saved[2];       // where the present step's results go
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane.row0 + lane.column_of(i);
    const bool there = row < a.rows && a.end[row] > a.begin[row];
    sequence[i] = row < a.rows ? (int)a.sequence[row] : 0;
    first[i] = there ? (int)a.begin[row] - a.lead : 0;
    last[i] = there ? (int)a.end[row] : 0;
    const index_t token = (index_t)first[i] * a.batch + sequence[i];
#pragma unroll
    for (int p = 0; p < PARTS; p++) to_states[i][p] = a.states[p] + (token + a.batch) * n + lane.unit;
    to_saved[i] = a.saved + token * (SAVED * n) + lane.unit;
  }
  float state[4][PARTS], kept[DECAY ? 4 : 1][PARTS], mask[DROPPED ? 4 : 1];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int row = lane.row0 + lane.column_of(e), unit = lane.unit_of(e);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float *from = a.lead ? a.origin + (index_t)sequence[e & 1] * PARTS * n : a.starts + (index_t)row * PARTS * n;
      state[e][p] = row < a.rows && unit < n ? from[p * n + unit] : 0.0f;
      if (DECAY) kept[DECAY ? e : 0][p] = 1.0f;
    }
    if (DROPPED) mask[DROPPED ? e : 0] = unit < n ? a.mask[(index_t)sequence[e & 1] * n + unit] : 1.0f;
  }
  auto shown = [&](int e) { return DROPPED ? state[e][0] * mask[DROPPED ? e : 0] : state[e][0]; };

  // What brings all states of this block into the range of fp16, where they stay in a box: mostly 1.
  float shrink = 1.0f, grow = 1.0f;
  if (BOUNDED) {
    float largest = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int unit = lane.unit_of(e), row = lane.row0 + lane.column_of(e);
      float own = fabsf(state[e][0]);
      if (RESETS && row < a.rows && unit < n)
        own = fmaxf(own, fabsf(a.origin[(index_t)sequence[e & 1] * PARTS * n + unit]));
      largest = fmaxf(largest, DROPPED ? fmaxf(own, 1.0f) * mask[DROPPED ? e : 0] : own);
    }
    if (largest > 16384.0f) atomicMax((int *)scales, __float_as_int(largest));   // not negative: ordered as its bits
    meet();
    const float most = *scales;
    if (most > 0.0f) {
      const unsigned exponent = __float_as_uint(most) >> 23;
      shrink = into_range(exponent), grow = out_of_range(exponent);
    }
  }

  auto put_back = [&](int i) {                    // row i's state to where its sequence began
#pragma unroll
    for (int e = i; e < 4; e += 2)
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const int unit = lane.unit_of(e);
        state[e][p] = unit < n ? a.origin[((index_t)sequence[i] * PARTS + p) * n + unit] : 0.0f;
        if (DECAY) kept[DECAY ? e : 0][p] = 0.0f;
      }
  };
  auto publish = [&](int step) {                  // the state before a step, for all warps
    if (a.lead && step == a.lead) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = lane.row0 + lane.column_of(e), unit = lane.unit_of(e);
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          if (row < a.rows && unit < n) a.starts[((index_t)row * PARTS + p) * n + unit] = state[e][p];
          if (DECAY) kept[DECAY ? e : 0][p] = 1.0f;
        }
      }
    }
    if (RESETS)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int t = first[i] + step;
        if (t >= 0 && t < last[i] && a.resets[(index_t)t * a.batch + sequence[i]]) put_back(i);
      }
    float by[2] = {shrink, shrink};
    if (!BOUNDED) {
      const unsigned packed = over_units(exponents(fmaxf(fabsf(shown(0)), fabsf(shown(2))),
                                                   fmaxf(fabsf(shown(1)), fabsf(shown(3)))));
      float *const scale = scales + ((step & 1) * WARPS + threadIdx.x / 32) * ROWS;
      if (lane.g < 2) scale[2 * lane.t + lane.g] = out_of_range(exponent_of(packed, lane.g));
      by[0] = into_range(exponent_of(packed, 0)), by[1] = into_range(exponent_of(packed, 1));
    }
#pragma unroll
    for (int e = 0; e < 4; e++) operand.put(operand.buffer(step), e, 0, shown(e) * by[e & 1]);
  };

  const float *const own_inputs = ring + 2 * lane.t * INPUT_ROW + lane.unit;
  publish(0);
#pragma unroll 1
  for (int step = 0; step < walk; step++) {
    if (!COPIER) wait_for_copies<RING - 2>();
    meet();                                       // states and inputs of this step are there
    const int buffer = operand.buffer(step);
    float sums[PRODUCTS][SUMS][4] = {}, y[PRODUCTS][4] = {};
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
      for (int j = 0; j < SLABS; j++) {
        if (BOUNDED) {
          multiply_slab(sums[q], w[q][j], operand.slab(buffer, 0, j));
        } else {
          const float2 by = *(const float2 *)(scales + ((step & 1) * WARPS + j) * ROWS + 2 * lane.t);
          float slab[SUMS][4] = {};
          multiply_slab(slab, w[q][j], operand.slab(buffer, 0, j));
#pragma unroll
          for (int e = 0; e < 4; e++) y[q][e] = fmaf(total(slab, e), e & 1 ? by.y : by.x, y[q][e]);
        }
      }
    const float *const input = own_inputs + step % RING * ROWS * INPUT_ROW;
    float next[4][PARTS], save[4][SAVED > 0 ? SAVED : 1], keep[4][PARTS];
#pragma unroll
    for (int e = 0; e < 4; e++) {                 // no branches here: the four elements hide each other's latencies
      float terms[PRODUCTS], u[INPUTS > 0 ? INPUTS : 1];
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++) terms[q] = BOUNDED ? total(sums[q], e) * grow : y[q][e];
#pragma unroll
      for (int k = 0; k < INPUTS; k++) u[k] = input[(e & 1) * INPUT_ROW + k * N + 8 * (e >> 1)];
      advance(terms, u, vectors[e >> 1], state[e], next[e], save[e], keep[e]);
    }
    bool steps[2];                                // a row that does not step now stays where it is
#pragma unroll
    for (int i = 0; i < 2; i++) steps[i] = first[i] + step >= 0 && first[i] + step < last[i];
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        state[e][p] = steps[e & 1] ? next[e][p] : state[e][p];
        if (DECAY) kept[DECAY ? e : 0][p] *= steps[e & 1] ? keep[e][p] : 1.0f;
      }
    publish(step + 1);
    if (STORES) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool writes = steps[i] && step >= a.lead;
#pragma unroll
        for (int e = i; e < 4; e += 2)
          if (writes && inside(lane.unit_of(e))) {
#pragma unroll
            for (int p = 0; p < PARTS; p++) to_states[i][p][8 * (e >> 1)] = next[e][p];
            if (STORES > 1)
#pragma unroll
              for (int k = 0; k < SAVED; k++) to_saved[i][8 * (e >> 1) + k * n] = save[e][k];
          }
#pragma unroll
        for (int p = 0; p < PARTS; p++) to_states[i][p] += (index_t)a.batch * n;
        if (STORES > 1) to_saved[i] += (index_t)a.batch * (SAVED * n);
      }
    }
    if (!COPIER) inputs.fetch(a, step + RING - 1);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int row = lane.row0 + lane.column_of(e), unit = lane.unit_of(e);
    if (row >= a.rows || unit >= n) continue;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const index_t at = ((index_t)row * PARTS + p) * n + unit;
      a.ends[at] = state[e][p];
      if (DECAY) a.decay[at] = kept[DECAY ? e : 0][p];
    }
  }
}
