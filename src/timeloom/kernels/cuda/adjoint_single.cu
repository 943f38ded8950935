// An adjoint sweep of single rows: see single.cuh; arguments and cells as in adjoint.cu.
#include "single.cuh"
#include "adjoint_args.cuh"

extern "C" __global__ void SHAPE adjoint(const __grid_constant__ AdjointArgs a) {
  if (a.unless && *a.unless <= a.limit) return;   // a NaN is not
  __shared__ __align__(16) float operand[2][PRODUCTS * N];
  __shared__ __align__(16) float ring[RING][STREAMS * OWN_UNITS];
  const int n = UNITS, slice = threadIdx.x % SLICES, own = threadIdx.x / SLICES, row = blockIdx.x / CLUSTER;
  const int unit = rank_in_cluster() * OWN_UNITS + own;
  const int sequence = (int)a.sequence[row], begin = (int)a.begin[row], end = (int)a.end[row];
  const int late = end + a.lead - 1, walk = end > begin ? a.lead + end - begin : 0;
  const int length = a.lead ? (int)a.lengths[sequence] : a.steps;
  index_t token = (index_t)late * a.batch + sequence;
  const bool writer = slice == 0 && inside(unit);

  float w[PRODUCTS][GROUPS][4];                   // of the transposed matrix
#pragma unroll
  for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int term = 4 * (slice + SLICES * i) + k;
        w[q][i][k] = inside(unit) && inside(term) ? a.weights[(q * n + term) * n + unit] : 0.0f;
      }
  float vectors[VECTORS > 0 ? VECTORS : 1], grad[PARTS], kept[PARTS], diverted[PARTS];
#pragma unroll
  for (int k = 0; k < VECTORS; k++) vectors[k] = inside(unit) ? a.vectors[k * n + unit] : 0.0f;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    kept[p] = 1.0f, diverted[p] = 0.0f, grad[p] = 0.0f;
    if (!inside(unit)) continue;
    if (!a.lead) grad[p] = a.starts[((index_t)row * PARTS + p) * n + unit];
    else if (late + 1 >= length && a.final) grad[p] = a.final[((index_t)sequence * PARTS + p) * n + unit];
  }
  for (int i = threadIdx.x; i < RING * STREAMS * OWN_UNITS; i += THREADS) ring[0][i] = 0.0f;
  meet();
  Copies<STREAMS> streams(ring[0], [&](int vector, index_t &stride) -> const float * {
    stride = -(index_t)a.batch * n;
    if (vector < SAVED) {
      stride *= SAVED;
      return a.saved + token * (SAVED * n) + vector * n;
    }
    const int state = vector - SAVED;
    if (state < BEFORES) return a.states[HAS(BEFORE, 0) ? state : 1] + token * n;
    if (state < BEFORES + AFTERS) return a.states[HAS(AFTER, 0) ? state - BEFORES : 1] + (token + a.batch) * n;
    return a.incoming ? a.incoming + token * n : nullptr;
  });
  auto fetch = [&](int step) { streams.fetch(step, step < walk && late - step < a.steps); };
#pragma unroll 1
  for (int step = 0; step < RING - 1; step++) fetch(step);
  wait_for_copies<RING - 2>();
  meet();
  auto enter = [&](int step) {                    // a lead ends: what it found is where the row begins
    if (!a.lead || step != a.lead) return;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      if (writer) a.starts[((index_t)row * PARTS + p) * n + unit] = grad[p];
      kept[p] = 1.0f, diverted[p] = 0.0f;
    }
  };
  const float mask = DROPPED && inside(unit) ? a.mask[(index_t)sequence * n + unit] : 1.0f;
  float *to_grads = a.gate_grads + token * (GRADS * n) + unit;

  if (!walk) enter(a.lead);
#pragma unroll 1
  for (int step = 0; step < walk; step++) {
    const int t = late - step;
    const bool steps = t < length, reset = RESETS && steps && a.resets[token];
    const float *in = &ring[step % RING][own];
    float save[SAVED > 0 ? SAVED : 1], before[PARTS] = {}, after[PARTS] = {}, g[PARTS];
    float d_products[PRODUCTS], grads[GRADS], through[PARTS], keep[PARTS];
#pragma unroll
    for (int k = 0; k < SAVED; k++, in += OWN_UNITS) save[k] = *in;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      if (HAS(BEFORE, p)) before[p] = *in, in += OWN_UNITS;
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      if (HAS(AFTER, p)) after[p] = *in, in += OWN_UNITS;
    if (RESETS && reset && inside(unit))
#pragma unroll
      for (int p = 0; p < PARTS; p++) before[p] = a.origin[((index_t)sequence * PARTS + p) * n + unit];
#pragma unroll
    for (int p = 0; p < PARTS; p++) g[p] = p == 0 ? grad[p] + *in : grad[p];
    pull(save, before, after, vectors, g, d_products, grads, through, keep);
#if CLUSTER > 1
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) put(&operand[step & 1][q * N + unit], d_products[q], slice);
#else
    float *const write = &operand[step & 1][slice * N + unit];
#pragma unroll
    for (int q = 0; q < PRODUCTS; q += SLICES) {
      const float value = pick<PRODUCTS>(d_products, q, slice);
      if (q + slice < PRODUCTS) write[q * N] = value;
    }
#endif
    fetch(step + RING - 1);
    wait_for_copies<RING - 2>();
    meet();                                       // gradients of all units are there, and the next step's inputs
    if (STORES) {
#pragma unroll
      for (int k = 0; k < GRADS; k += SLICES) {
        const float value = pick<GRADS>(grads, k, slice);
        if (steps && step >= a.lead && inside(unit) && k + slice < GRADS) to_grads[(k + slice) * n] = value;
      }
      to_grads -= (index_t)a.batch * (GRADS * n);
    }
    const float *const read = &operand[step & 1][4 * slice];
    float y[2] = {};
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int q = 0; q < PRODUCTS; q++) {
        const float4 d = *(const float4 *)(read + q * N + 4 * SLICES * i);
        y[0] = fmaf(w[q][i][0], d.x, y[0]), y[1] = fmaf(w[q][i][1], d.y, y[1]);
        y[0] = fmaf(w[q][i][2], d.z, y[0]), y[1] = fmaf(w[q][i][3], d.w, y[1]);
      }
    const float all = over_slices(y[0] + y[1]), sum = DROPPED ? all * mask : all;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float value = through[p] + (p == 0 ? sum : 0.0f);
      if (RESETS) diverted[p] += reset ? value : 0.0f;
      if (DECAY) kept[p] *= !steps ? 1.0f : RESETS && reset ? 0.0f : keep[p];
      grad[p] = !steps ? grad[p] : RESETS && reset ? 0.0f : value;
    }
    token -= a.batch;
    enter(step + 1);
  }
  if (CLUSTER > 1) meet();                        // no block leaves while others may write to it
  if (!writer) return;
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const index_t at = ((index_t)row * PARTS + p) * n + unit;
    a.ends[at] = grad[p];
    if (DECAY) a.decay[at] = kept[p];
    if (RESETS) a.reset_grads[at] = diverted[p];
  }
}
