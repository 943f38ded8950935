// An adjoint sweep of a compiled step: see fused.cuh. The readable twin is kernels/reference.py.

#define RING_STATE ((INPUTS + 3) / 4 * 4)         // where the state before a step is among what is copied for it
#define RING_ADDED (RING_STATE + ROOM)            // and what the loss itself adds to the gradient behind it
// GRAD_IS_MULTIPLIED: whether a product is taken of the gradient as it is. IN_FOURS: whether all parts are fours of units.

template <int PART> INLINE void copy_parts(const FusedArgs &a, float *slot, index_t token) {
  if constexpr (PART < PARTS) {
    constexpr int WIDTH = part_width[PART], PLACE = part_place[PART], OFFSET = part_offset[PART];
    copy_vector<WIDTH>(slot + RING_STATE + PLACE, a.states[PART] + token * WIDTH);
    if (a.incoming && OFFSET < a.incoming_width)
      copy_vector<WIDTH, IN_FOURS>(slot + RING_ADDED + PLACE, a.incoming + token * a.incoming_width + OFFSET);
    copy_parts<PART + 1>(a, slot, token);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) fused_adjoint(const __grid_constant__ FusedArgs a) {
  extern __shared__ __align__(16) float shared[];
  const index_t row = blockIdx.x, b = a.sequence[row], begin = a.begin[row], end = a.end[row];
  const index_t length = a.lead ? a.lengths[b] : end, behind = end + a.lead;
  const bool empty = end <= begin;
  const index_t last = empty ? begin : behind < length ? behind : length;    // the walk is from last - 1 to begin
  float *const decay = shared + AT_DECAY, *const ring = shared + AT_RING;
  Step step;
  step.load(a, shared);
  for_state([&](int i, int at) {
    const bool entered = behind >= length && a.final;
    shared[AT_STATE + at] = !a.lead ? a.starts[row * SIZE + i] : entered ? a.final[b * SIZE + i] : 0.0f;
    if (a.decay) decay[at] = 1.0f;
  });
  for (int i = threadIdx.x; i < TOTALS * WARPS_IN_FOURS; i += THREADS) shared[AT_TOTALS + i] = 0.0f;
  for (int i = threadIdx.x; i < RING * RING_ROOM; i += THREADS) ring[i] = 0.0f;     // where nothing is added
  meet();
  auto fetch = [&](index_t t) {
    if (t >= begin) {
      const index_t token = t * a.batch + b;
      float *const slot = ring + (last - 1 - t) % RING * RING_ROOM;
      copy_vector<INPUTS>(slot, a.inputs + token * INPUTS);
      copy_parts<0>(a, slot, token);
    }
    copies_end();
  };
#pragma unroll 1
  for (int ahead = 0; ahead < RING - 1; ahead++) fetch(last - 1 - ahead);
  bool reset = a.resets && last > begin && a.resets[(last - 1) * a.batch + b];
  int now = 0;
#pragma unroll 1
  for (index_t t = last - 1; t >= begin; t--, now ^= 1) {
    const index_t token = t * a.batch + b;
    const bool real = t < end, reset_next = a.resets && t > begin && a.resets[token - a.batch];
    float *const grad = shared + AT_STATE + now * ROOM, *const next = shared + AT_STATE + (now ^ 1) * ROOM;
    float *const slot = ring + (last - 1 - t) % RING * RING_ROOM;
    wait_for_copies<RING - 2>();
    meet();                                       // the gradient behind this step and what it reads are there
    if (a.lead && t == end - 1) save_state(a.starts, row, grad);
    if (reset) for_state([&](int i, int at) { slot[RING_STATE + at] = a.origin[b * SIZE + i]; });
    if (GRAD_IS_MULTIPLIED) {                     // else it is added where the gradient is read
      for_state([&](int, int at) { grad[at] += slot[RING_ADDED + at], slot[RING_ADDED + at] = 0.0f; });
    }
    if (reset || GRAD_IS_MULTIPLIED) meet();
    fetch(t - RING + 1);
    step.run(a, shared, slot + RING_STATE, grad, slot + RING_ADDED, next, slot, token, a.decay && real,
             a.written && real);
    if (reset) {
      meet();
      for_state([&](int i, int at) {
        if (real && a.reset_grads) a.reset_grads[row * SIZE + i] += next[at];
        if (a.decay && real) decay[at] = 0.0f;
        next[at] = 0.0f;
      });
    }
    reset = reset_next;
  }
  meet();
  if (a.lead && empty) save_state(a.starts, row, shared + AT_STATE);
  save_state(a.ends, row, shared + AT_STATE + now * ROOM);
  save_decay(a, row, decay, empty);
}
