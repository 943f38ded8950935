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
  if (a.unless && *a.unless <= a.limit) return;   // a NaN is not
  extern __shared__ __align__(16) float all_rows[];
  float *const shared = all_rows + OWN_ROW * ROW_ROOM, *const decay = shared + AT_DECAY, *const ring = shared + AT_RING;
  const index_t row = (index_t)blockIdx.x * ROWS + OWN_ROW;
  const bool there = row < a.rows;
  const index_t b = there ? a.sequence[row] : 0, begin = there ? a.begin[row] : 0, end = there ? a.end[row] : 0;
  const index_t length = a.lead && there ? a.lengths[b] : end, behind = end + a.lead;
  const bool empty = end <= begin;
  const index_t last = empty ? begin : behind < length ? behind : length;    // the walk is from last - 1 to begin
  const int walk = (int)(last - begin), longest_walk = longest(walk);
  Step step;
  step.load(a, all_rows);
  for_state([&](int i, int at) {
    const bool entered = behind >= length && a.final;
    if (there) shared[AT_STATE + at] = !a.lead ? a.starts[row * SIZE + i] : entered ? a.final[b * SIZE + i] : 0.0f;
    if (a.decay) decay[at] = 1.0f;
  });
  for (int i = IN_ROW; i < TOTALS * WARPS_IN_FOURS; i += THREADS / ROWS) shared[AT_TOTALS + i] = 0.0f;
  for (int i = IN_ROW; i < RING * RING_ROOM; i += THREADS / ROWS) ring[i] = 0.0f;   // where nothing is added
  meet();
  auto fetch = [&](int at) {
    if (at < walk) {
      const index_t token = (last - 1 - at) * a.batch + b;
      copy_vector<INPUTS>(ring + at % RING * RING_ROOM, a.inputs + token * INPUTS);
      copy_parts<0>(a, ring + at % RING * RING_ROOM, token);
    }
    copies_end();
  };
#pragma unroll 1
  for (int at = 0; at < RING - 1; at++) fetch(at);
  index_t token = (last - 1) * a.batch + b;
  bool reset = a.resets && walk > 0 && a.resets[token];
#pragma unroll 1
  for (int at = 0; at < longest_walk; at++, token -= a.batch) {
    const index_t t = last - 1 - at;
    const bool steps = at < walk, real = steps && t < end;
    const bool reset_next = a.resets && at + 1 < walk && a.resets[token - a.batch];
    float *const grad = shared + AT_STATE + at % 2 * ROOM, *const next = shared + AT_STATE + (at + 1) % 2 * ROOM;
    float *const slot = ring + at % RING * RING_ROOM;
    wait_for_copies<RING - 2>();
    meet();                                       // the gradient behind this step and what it reads are there
    if (a.lead && steps && t == end - 1) save_state(a.starts, row, grad);
    if (reset) for_state([&](int i, int at) { slot[RING_STATE + at] = a.origin[b * SIZE + i]; });
    if (GRAD_IS_MULTIPLIED && steps) {            // else it is added where the gradient is read
      for_state([&](int, int at) { grad[at] += slot[RING_ADDED + at], slot[RING_ADDED + at] = 0.0f; });
    }
    if (a.resets || GRAD_IS_MULTIPLIED) meet();
    fetch(at + RING - 1);
    step.run(a, shared, slot + RING_STATE, grad, slot + RING_ADDED, next, slot, token, steps, a.decay && real,
             a.written && real);
    if (a.resets) meet();
    if (reset)
      for_state([&](int i, int at) {
        if (real && a.reset_grads) a.reset_grads[row * SIZE + i] += next[at];
        if (a.decay && real) decay[at] = 0.0f;
        next[at] = 0.0f;
      });
    reset = reset_next;
  }
  meet();
  if (!there) return;
  if (a.lead && empty) save_state(a.starts, row, shared + AT_STATE);
  save_state(a.ends, row, shared + AT_STATE + walk % 2 * ROOM);
  save_decay(a, row, decay, empty);
}
