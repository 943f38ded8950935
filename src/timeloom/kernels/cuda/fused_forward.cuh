// A forward sweep of a compiled step: see fused.cuh. The readable twin is kernels/reference.py.

extern "C" __global__ void __launch_bounds__(THREADS) fused_forward(const __grid_constant__ FusedArgs a) {
  if (a.unless && *a.unless <= a.limit) return;   // a NaN is not
  extern __shared__ __align__(16) float all_rows[];
  float *const shared = all_rows + OWN_ROW * ROW_ROOM, *const decay = shared + AT_DECAY, *const ring = shared + AT_RING;
  const index_t row = (index_t)blockIdx.x * ROWS + OWN_ROW;
  const bool there = row < a.rows;
  const index_t b = there ? a.sequence[row] : 0, begin = there ? a.begin[row] : 0, end = there ? a.end[row] : 0;
  const bool empty = end <= begin;
  const index_t first = empty ? end : begin > a.lead ? begin - a.lead : 0;
  const int walk = (int)(end - first), longest_walk = longest(walk);
  Step step;
  step.load(a, all_rows);
  for_state([&](int i, int at) {
    if (there) shared[AT_STATE + at] = a.lead ? a.origin[b * SIZE + i] : a.starts[row * SIZE + i];
    if (a.decay) decay[at] = 1.0f;
  });
  for (int i = IN_ROW; i < TOTALS * WARPS_IN_FOURS; i += THREADS / ROWS) shared[AT_TOTALS + i] = 0.0f;
  auto fetch = [&](int at) {
    if (at < walk)
      copy_vector<INPUTS>(ring + at % RING * RING_ROOM, a.inputs + ((first + at) * a.batch + b) * INPUTS);
    copies_end();
  };
#pragma unroll 1
  for (int at = 0; at < RING - 1; at++) fetch(at);
  bool reset = a.resets && walk > 0 && a.resets[first * a.batch + b];
  index_t token = first * a.batch + b;
#pragma unroll 1
  for (int at = 0; at < longest_walk; at++, token += a.batch) {
    const bool steps = at < walk, real = steps && first + at >= begin;
    const bool reset_next = a.resets && at + 1 < walk && a.resets[token + a.batch];
    float *const state = shared + AT_STATE + at % 2 * ROOM;
    wait_for_copies<RING - 2>();
    meet();                                       // the state and the inputs of this step are there
    if (a.lead && steps && first + at == begin) save_state(a.starts, row, state);
    if (a.resets) {
      if (reset)
        for_state([&](int i, int at) {
          state[at] = a.origin[b * SIZE + i];
          if (a.decay && real) decay[at] = 0.0f;
        });
      meet();
    }
    fetch(at + RING - 1);
    step.run(a, shared, state, shared + AT_STATE + (at + 1) % 2 * ROOM, ring + at % RING * RING_ROOM, token, steps,
             a.decay && real, a.states[0] && real);
    reset = reset_next;
  }
  meet();
  if (!there) return;
  if (a.lead && empty) save_state(a.starts, row, shared + AT_STATE);
  save_state(a.ends, row, shared + AT_STATE + walk % 2 * ROOM);
  save_decay(a, row, decay, empty);
}
