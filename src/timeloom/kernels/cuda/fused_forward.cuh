// A forward sweep of a compiled step: see fused.cuh. The readable twin is kernels/reference.py.

extern "C" __global__ void __launch_bounds__(THREADS) fused_forward(const __grid_constant__ FusedArgs a) {
  extern __shared__ __align__(16) float shared[];
  const index_t row = blockIdx.x, b = a.sequence[row], begin = a.begin[row], end = a.end[row];
  const bool empty = end <= begin;
  const index_t first = empty ? end : begin > a.lead ? begin - a.lead : 0;
  float *const decay = shared + AT_DECAY, *const ring = shared + AT_RING;
  Step step;
  step.load(a, shared);
  for_state([&](int i, int at) {
    shared[AT_STATE + at] = a.lead ? a.origin[b * SIZE + i] : a.starts[row * SIZE + i];
    if (a.decay) decay[at] = 1.0f;
  });
  for (int i = threadIdx.x; i < TOTALS * WARPS_IN_FOURS; i += THREADS) shared[AT_TOTALS + i] = 0.0f;
  auto fetch = [&](index_t t) {
    if (t < end) copy_vector<INPUTS>(ring + (t - first) % RING * RING_ROOM, a.inputs + (t * a.batch + b) * INPUTS);
    copies_end();
  };
#pragma unroll 1
  for (int ahead = 0; ahead < RING - 1; ahead++) fetch(first + ahead);
  bool reset = a.resets && first < end && a.resets[first * a.batch + b];
  int now = 0;
#pragma unroll 1
  for (index_t t = first; t < end; t++, now ^= 1) {
    const index_t token = t * a.batch + b;
    const bool real = t >= begin, reset_next = a.resets && t + 1 < end && a.resets[token + a.batch];
    float *const state = shared + AT_STATE + now * ROOM;
    wait_for_copies<RING - 2>();
    meet();                                       // the state and the inputs of this step are there
    if (a.lead && t == begin) save_state(a.starts, row, state);
    if (reset) {
      for_state([&](int i, int at) {
        state[at] = a.origin[b * SIZE + i];
        if (a.decay && real) decay[at] = 0.0f;
      });
      meet();
    }
    fetch(t + RING - 1);
    step.run(a, shared, state, shared + AT_STATE + (now ^ 1) * ROOM, ring + (t - first) % RING * RING_ROOM, token,
             a.decay && real, a.states[0] && real);
    reset = reset_next;
  }
  meet();
  if (a.lead && empty) save_state(a.starts, row, shared + AT_STATE);
  save_state(a.ends, row, shared + AT_STATE + now * ROOM);
  save_decay(a, row, decay, empty);
}
