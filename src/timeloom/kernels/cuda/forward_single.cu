// A forward sweep of single rows: see single.cuh; arguments and cells as in forward.cu.
#include "single.cuh"
#include "forward_args.cuh"

extern "C" __global__ void SHAPE forward(const __grid_constant__ ForwardArgs a) {
  if (a.unless && *a.unless <= a.limit) return;   // a NaN is not
  __shared__ __align__(16) float operand[2][N];
  __shared__ __align__(16) float ring[RING][INPUTS * OWN_UNITS];
  const int n = UNITS, slice = threadIdx.x % SLICES, own = threadIdx.x / SLICES, row = blockIdx.x / CLUSTER;
  const int unit = rank_in_cluster() * OWN_UNITS + own;
  const int sequence = (int)a.sequence[row], end = (int)a.end[row], length = end - (int)a.begin[row];
  const int first = (int)a.begin[row] - a.lead, walk = length > 0 ? a.lead + length : 0;
  const index_t token = (index_t)first * a.batch + sequence;
  const bool writer = slice == 0 && inside(unit);

  float w[PRODUCTS][GROUPS][4];
#pragma unroll
  for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
      load_terms(w[q][i], a.weights + (q * n + unit) * n, 4 * (slice + SLICES * i), inside(unit));
  float vectors[VECTORS > 0 ? VECTORS : 1], state[PARTS], kept[PARTS];
#pragma unroll
  for (int k = 0; k < VECTORS; k++) vectors[k] = inside(unit) ? a.vectors[k * n + unit] : 0.0f;
  const float *const origin = a.origin + (index_t)sequence * PARTS * n + unit;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const float *const from = a.lead ? origin : a.starts + (index_t)row * PARTS * n + unit;
    state[p] = inside(unit) ? from[p * n] : 0.0f;
    kept[p] = 1.0f;
  }
  for (int i = threadIdx.x; i < RING * INPUTS * OWN_UNITS; i += THREADS) ring[0][i] = 0.0f;   // units beyond n stay zero
  meet();
  Copies<INPUTS> inputs(ring[0], [&](int vector, index_t &stride) {
    stride = (index_t)a.batch * (ROW * n);
    return a.inputs + token * (ROW * n) + PLACE(vector) * n;
  });
  auto fetch = [&](int step) { inputs.fetch(step, step < walk && first + step >= 0); };
#pragma unroll 1
  for (int step = 0; step < RING - 1; step++) fetch(step);

  const float mask = DROPPED && inside(unit) ? a.mask[(index_t)sequence * n + unit] : 1.0f;
  auto put_state = [&](int step) {
    const float shown = DROPPED ? state[0] * mask : state[0];
#if CLUSTER > 1
    put(&operand[step & 1][unit], shown, slice);
#else
    if (slice == 0) operand[step & 1][unit] = shown;
#endif
  };
  auto publish = [&](int step) {                  // the state before a step, for all warps
    if (a.lead && step == a.lead) {
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        if (writer) a.starts[((index_t)row * PARTS + p) * n + unit] = state[p];
        kept[p] = 1.0f;
      }
    }
    if (RESETS && step < walk && first + step >= 0 && a.resets[token + (index_t)step * a.batch])
#pragma unroll
      for (int p = 0; p < PARTS; p++) state[p] = inside(unit) ? origin[p * n] : 0.0f, kept[p] = 0.0f;
    put_state(step);
  };
  float *to_states[PARTS], *to_saved = a.saved + token * (SAVED * n) + unit;
#pragma unroll
  for (int p = 0; p < PARTS; p++) to_states[p] = a.states[p] + (token + a.batch) * n + unit;

  publish(length > 0 ? 0 : a.lead);
#pragma unroll 1
  for (int step = 0; step < walk; step++) {
    wait_for_copies<RING - 2>();
    meet();                                       // the state and the inputs of this step are there
    const float *const read = &operand[step & 1][4 * slice], *const in = &ring[step % RING][own];
    float y[PRODUCTS] = {}, more[PRODUCTS] = {};
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      const float4 h = *(const float4 *)(read + 4 * SLICES * i);
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++) {
        y[q] = fmaf(w[q][i][0], h.x, y[q]), more[q] = fmaf(w[q][i][1], h.y, more[q]);
        y[q] = fmaf(w[q][i][2], h.z, y[q]), more[q] = fmaf(w[q][i][3], h.w, more[q]);
      }
    }
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) y[q] = over_slices(y[q] + more[q]);
    float u[INPUTS > 0 ? INPUTS : 1], next[PARTS], save[SAVED > 0 ? SAVED : 1], keep[PARTS];
#pragma unroll
    for (int k = 0; k < INPUTS; k++) u[k] = in[k * OWN_UNITS];
    advance(y, u, vectors, state, next, save, keep);
    const bool steps = first + step >= 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      state[p] = steps ? next[p] : state[p];
      if (DECAY) kept[p] *= steps ? keep[p] : 1.0f;
    }
    publish(step + 1);
    if (STORES) {
      const bool writes = steps && step >= a.lead && inside(unit);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        if (writes && slice == p % SLICES) *to_states[p] = next[p];
        to_states[p] += (index_t)a.batch * n;
      }
      if (STORES > 1) {
#pragma unroll
        for (int k = 0; k < SAVED; k += SLICES) {
          const float value = pick<SAVED>(save, k, slice);
          if (writes && k + slice < SAVED) to_saved[(k + slice) * n] = value;
        }
        to_saved += (index_t)a.batch * (SAVED * n);
      }
    }
    fetch(step + RING - 1);
  }
  if (CLUSTER > 1) meet();                        // no block leaves while others may write to it
  if (!writer) return;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const index_t at = ((index_t)row * PARTS + p) * n + unit;
    a.ends[at] = state[p];
    if (DECAY) a.decay[at] = kept[p];
  }
}
