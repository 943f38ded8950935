// An adjoint sweep: gradients from the end of every row back to its begin, at the stored states.
//
//   λ[t] = (what the cell passes by of λ[t + 1] + incoming[t]) + Wᵀ (gradients of the products)
//
// The cell gives PRODUCTS, PARTS, SAVED, VECTORS, GRADS, BEFORE, AFTER and `pull`; BEFORE and AFTER are the parts of the
// state that it wants to see before and after a step, as bits. The readable twin is kernels/reference.py.
#include "rows.cuh"
#include "adjoint_args.cuh"

#define STREAM_ROW RING_ROW(STREAMS)
#define GRAD_ROW OPERAND_ROW(PRODUCTS)
#define OPERAND_BYTES (2 * ROWS * GRAD_ROW * 2)
#define RING_BYTES (RING * ROWS * STREAM_ROW * 4)

struct Streams {                                  // this thread's share of the copies
  index_t token;
  float *ring;
  int late, walk;
  __device__ __forceinline__ Streams(const AdjointArgs &a, float *ring, int walk) : ring(ring), walk(walk) {
    const int row = blockIdx.x * ROWS + copied_row();
    const bool there = row < a.rows && a.end[row] > a.begin[row];
    late = there ? (int)a.end[row] + a.lead - 1 : -1;
    token = there ? (index_t)late * a.batch + a.sequence[row] : 0;
  }
  __device__ __forceinline__ void fetch(const AdjointArgs &a, int step) {
    const int n = UNITS;
    if (step < walk && (unsigned)(late - step) < (unsigned)a.steps) {
      float *to = ring + (step % RING * ROWS + copied_row()) * STREAM_ROW;
#pragma unroll
      for (int i = 0; i < SAVED; i++, to += N) copy_vector(to, a.saved + token * (SAVED * n) + i * n);
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (HAS(BEFORE, p)) copy_vector(to, a.states[p] + token * n), to += N;
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (HAS(AFTER, p)) copy_vector(to, a.states[p] + (token + a.batch) * n), to += N;
      if (a.incoming) copy_vector(to, a.incoming + token * n);
    }
    token -= a.batch;
    copies_end();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) adjoint(const __grid_constant__ AdjointArgs a) {
  if (a.unless && *a.unless <= a.limit) return;   // a NaN is not
  extern __shared__ __align__(16) unsigned char shared[];
  float *const ring = (float *)(shared + OPERAND_BYTES);          // [RING][ROWS][STREAM_ROW]; units beyond n stay zero
  float *const scales = (float *)(shared + OPERAND_BYTES + RING_BYTES);   // [2][WARPS][ROWS]
  const Lane lane;
  const Operand operand((half_bits *)shared, GRAD_ROW, lane);     // [2][ROWS][GRAD_ROW]
  const int n = UNITS, walk = a.lead + longest_row(a.begin, a.end, lane.row0, a.rows);
  clear_shared(shared, OPERAND_BYTES + RING_BYTES + 2 * WARPS * ROWS * 4);
  meet();
  Streams streams(a, ring, walk);
  if (!COPIER || threadIdx.x >= 32 * WARPS) {
#pragma unroll 1
    for (int step = 0; step < RING - 1; step++) streams.fetch(a, step);
    wait_for_copies<RING - 2>();
  }
  if (threadIdx.x >= 32 * WARPS) {
    meet();
#pragma unroll 1
    for (int step = 0; step < walk; step++) {
      streams.fetch(a, step + RING - 1);
      wait_for_copies<RING - 2>();                // of the next step
      meet();
    }
    return;
  }

  Weights w[PRODUCTS][SLABS];                     // of the transposed matrix
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

  // The two rows of this lane, walked from their last step to their first: row i is at time late - step, while that is
  // inside stop ... length - 1.
  int late[2], stop[2], length[2], sequence[2];
  float *to_grads[2];                             // where the present step's gradients go
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane.row0 + lane.column_of(i);
    const bool there = row < a.rows && a.end[row] > a.begin[row];
    sequence[i] = row < a.rows ? (int)a.sequence[row] : 0;
    late[i] = there ? (int)a.end[row] + a.lead - 1 : -1;
    stop[i] = there ? (int)a.begin[row] : 0;
    length[i] = there ? (a.lead ? (int)a.lengths[sequence[i]] : a.steps) : 0;
    to_grads[i] = a.gate_grads + ((index_t)late[i] * a.batch + sequence[i]) * (GRADS * n) + lane.unit;
  }
  float grad[4][PARTS], kept[DECAY ? 4 : 1][PARTS], diverted[RESETS ? 4 : 1][PARTS], mask[DROPPED ? 4 : 1];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int row = lane.row0 + lane.column_of(e), unit = lane.unit_of(e), i = e & 1;
    const bool at_end = late[i] + 1 >= length[i];
    if (DROPPED) mask[DROPPED ? e : 0] = unit < n ? a.mask[(index_t)sequence[i] * n + unit] : 1.0f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      grad[e][p] = 0.0f;
      if (DECAY) kept[DECAY ? e : 0][p] = 1.0f;
      if (RESETS) diverted[RESETS ? e : 0][p] = 0.0f;
      if (row >= a.rows || unit >= n) continue;
      if (!a.lead) grad[e][p] = a.starts[((index_t)row * PARTS + p) * n + unit];
      else if (at_end && a.final) grad[e][p] = a.final[((index_t)sequence[i] * PARTS + p) * n + unit];
    }
  }
  auto enter = [&](int step) {                    // a lead ends: what it found is where the row begins
    if (!a.lead || step != a.lead) return;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = lane.row0 + lane.column_of(e), unit = lane.unit_of(e);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        if (row < a.rows && unit < n) a.starts[((index_t)row * PARTS + p) * n + unit] = grad[e][p];
        if (DECAY) kept[DECAY ? e : 0][p] = 1.0f;
        if (RESETS) diverted[RESETS ? e : 0][p] = 0.0f;
      }
    }
  };

  const float *const own_streams = ring + 2 * lane.t * STREAM_ROW + lane.unit;
  meet();
#pragma unroll 1
  for (int step = 0; step < walk; step++) {
    if (!COPIER) streams.fetch(a, step + RING - 1);
    const float *const input = own_streams + step % RING * ROWS * STREAM_ROW;
    float d_products[4][PRODUCTS], through[4][PARTS], grads[4][GRADS], keep[4][PARTS], largest[2] = {0.0f, 0.0f};
    bool reset[2], steps[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = late[i] - step;
      steps[i] = t >= stop[i] && t < length[i];
      reset[i] = RESETS && steps[i] && a.resets[(index_t)t * a.batch + sequence[i]];
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {                 // no branches here: the four elements hide each other's latencies
      const int unit = lane.unit_of(e), i = e & 1;
      const float *row = input + (e & 1) * STREAM_ROW + 8 * (e >> 1);
      float save[SAVED > 0 ? SAVED : 1], before[PARTS] = {}, after[PARTS] = {}, g[PARTS];
#pragma unroll
      for (int k = 0; k < SAVED; k++, row += N) save[k] = *row;
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (HAS(BEFORE, p)) before[p] = *row, row += N;
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (HAS(AFTER, p)) after[p] = *row, row += N;
      if (RESETS && reset[i] && inside(unit))
#pragma unroll
        for (int p = 0; p < PARTS; p++) before[p] = a.origin[((index_t)sequence[i] * PARTS + p) * n + unit];
#pragma unroll
      for (int p = 0; p < PARTS; p++) g[p] = p == 0 ? grad[e][p] + *row : grad[e][p];
      pull(save, before, after, vectors[e >> 1], g, d_products[e], grads[e], through[e], keep[e]);
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++) largest[i] = fmaxf(largest[i], fabsf(d_products[e][q]));
    }
    const int buffer = operand.buffer(step);
    const unsigned packed = over_units(exponents(largest[0], largest[1]));
    float *const scale = scales + ((step & 1) * WARPS + threadIdx.x / 32) * ROWS;
    if (lane.g < 2) scale[2 * lane.t + lane.g] = out_of_range(exponent_of(packed, lane.g));
    const float by[2] = {into_range(exponent_of(packed, 0)), into_range(exponent_of(packed, 1))};
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++)
        operand.put(buffer, e, q, d_products[e][q] * by[e & 1]);
    if (!COPIER) wait_for_copies<RING - 2>();
    meet();                                       // gradients of all warps are there, and the next step's inputs
    if (STORES)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool writes = steps[i] && step >= a.lead;
#pragma unroll
        for (int e = i; e < 4; e += 2)
          if (writes && inside(lane.unit_of(e)))
#pragma unroll
            for (int k = 0; k < GRADS; k++) to_grads[i][8 * (e >> 1) + k * n] = grads[e][k];
        to_grads[i] -= (index_t)a.batch * (GRADS * n);
      }
    float y[4] = {};
#pragma unroll
    for (int j = 0; j < SLABS; j++) {
      const float2 out = *(const float2 *)(scales + ((step & 1) * WARPS + j) * ROWS + 2 * lane.t);
      float sums[SUMS][4] = {};
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++)
        multiply_slab(sums, w[q][j], operand.slab(buffer, q, j));
#pragma unroll
      for (int e = 0; e < 4; e++) y[e] = fmaf(total(sums, e), e & 1 ? out.y : out.x, y[e]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const int i = e & 1;
        const float sum = DROPPED ? y[e] * mask[DROPPED ? e : 0] : y[e];
        const float value = through[e][p] + (p == 0 ? sum : 0.0f);
        if (RESETS) diverted[RESETS ? e : 0][p] += reset[i] ? value : 0.0f;
        if (DECAY) kept[DECAY ? e : 0][p] *= !steps[i] ? 1.0f : RESETS && reset[i] ? 0.0f : keep[e][p];
        grad[e][p] = !steps[i] ? grad[e][p] : RESETS && reset[i] ? 0.0f : value;
      }
    enter(step + 1);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int row = lane.row0 + lane.column_of(e), unit = lane.unit_of(e);
    if (row >= a.rows || unit >= n) continue;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const index_t at = ((index_t)row * PARTS + p) * n + unit;
      a.ends[at] = grad[e][p];
      if (DECAY) a.decay[at] = kept[DECAY ? e : 0][p];
      if (RESETS) a.reset_grads[at] = diverted[RESETS ? e : 0][p];
    }
  }
}
