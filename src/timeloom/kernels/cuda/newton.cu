// A step of Newton's method on all states at once (DEER): see newton.cuh. With states s guessed,
//     f[t] = f(s[t-1], u[t])      J[t] = ∂f/∂s at s[t-1]      δ[t] = J[t] δ[t-1] + f[t] − s[t]      s ← s + δ.
// `compose` makes of every chunk the map from δ before it to δ behind it, and measures the residual f[t] − s[t];
// `chain` finds δ before every chunk; `apply` walks the chunks once more and writes the new states. `finish` evaluates
// the states that are left: f[t], what the adjoint needs, and the residual. The readable twin is kernels/newton.py.
#include "newton.cuh"
#include "newton_chain.cuh"

#define STREAM ((INPUTS + PARTS) * LANES)         // numbers of a step: inputs, and the state before it

// What a step is at the guessed states: what follows, what was guessed in its place, and the slopes.
struct Step {
  float before[PARTS], next[PARTS], guess[PARTS], saved[SAVED > 0 ? SAVED : 1];
};

// Walks a chunk: the inputs and guessed states of its steps come through a ring in shared memory. The lanes of a unit
// copy its numbers in turns.
struct Walk {
  static constexpr int OWN = (INPUTS + PARTS + SPLIT - 1) / SPLIT;
  const NewtonArgs &a;
  const Place place;
  float *ring, *to[OWN];
  const float *from[OWN];                         // in the next step to be fetched
  index_t stride[OWN];                            // from one step to the next
  int last[OWN], fetched;                         // the last step with such numbers, and the next step
  float w[PRODUCTS][UNITS], vectors[VECTORS > 0 ? VECTORS : 1];

  __device__ __forceinline__ Walk(const NewtonArgs &a, float *ring) : a(a), place(a, false), ring(ring), fetched(place.begin) {
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
      for (int j = 0; j < UNITS; j++) w[q][j] = place.there ? a.weights[(q * UNITS + place.unit) * UNITS + j] : 0.0f;
    load_vectors(vectors, a, place);
    for (int i = threadIdx.x; i < RING * STREAM; i += 32) ring[i] = 0.0f;
    __syncwarp();
    const index_t token = (index_t)place.begin * a.batch + place.sequence;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int k = place.slice + i * SPLIT, p = k - INPUTS;   // the state before a step is beside its inputs
      to[i] = ring + k * LANES + place.unit;
      last[i] = !place.there || p >= PARTS ? -1 : p < 0 ? place.end - 1 : place.end;
      stride[i] = (index_t)a.batch * UNITS * (p < 0 ? INPUTS : a.states[0] ? 1 : 0);
      from[i] = p < 0 ? a.inputs + (token * INPUTS + k) * UNITS
                : a.states[0] ? a.states[p < PARTS ? p : 0] + token * UNITS
                              : a.origin + ((index_t)place.sequence * PARTS + (p < PARTS ? p : 0)) * UNITS;
      from[i] += place.unit;
    }
    for (int t = 0; t < RING - 1; t++) fetch();
  }
  __device__ __forceinline__ float *slot(int t) const { return ring + t % RING * STREAM; }
  __device__ __forceinline__ void fetch() {       // inputs of the next step, and the state before it
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (fetched <= last[i]) copy_ahead<4>(address_of(to[i] + fetched % RING * STREAM), from[i]);
      from[i] += stride[i];
    }
    fetched++;
    copies_end();
  }
  // Of the step at hand and so many more; the state behind a step is beside the inputs of the next one.
  template <int MORE> __device__ __forceinline__ void arrive() const {
    wait_for_copies<RING - 2 - MORE>();
    __syncwarp();
  }
  __device__ __forceinline__ const float *h(int t) const { return slot(t) + INPUTS * LANES; }
  __device__ __forceinline__ float state(int t, int p) const { return h(t)[p * LANES + place.unit]; }
  // W_q v of all products, for v in shared memory
  __device__ __forceinline__ void multiply(float *y, const float *v) const {
    float more[PRODUCTS];
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) y[q] = more[q] = 0.0f;
#pragma unroll
    for (int j = 0; j < UNITS; j += 4) {
      const float4 four = quad(v + j);
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int q = 0; q < PRODUCTS; q++)
          if (j + k < UNITS) {
            float &sum = k % 2 ? more[q] : y[q];
            sum = fmaf(w[q][j + k < UNITS ? j + k : 0], part_of(four, k), sum);
          }
    }
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) y[q] += more[q];
  }
  __device__ __forceinline__ Step evaluate(int t) const {
    Step step;
    float y[PRODUCTS], u[INPUTS > 0 ? INPUTS : 1], keep[PARTS];
    multiply(y, h(t));
#pragma unroll
    for (int k = 0; k < INPUTS; k++) u[k] = slot(t)[k * LANES + place.unit];
#pragma unroll
    for (int p = 0; p < PARTS; p++) step.before[p] = state(t, p), step.guess[p] = state(t + 1, p);
    advance(y, u, vectors, step.before, step.next, step.saved, keep);
    return step;
  }
  __device__ __forceinline__ Slopes slopes(const Step &step) const {
    return Slopes(step.saved, step.before, step.next, vectors);
  }
};

// The largest of all lanes; of numbers that are not negative, where NaN is the largest.
__device__ __forceinline__ float largest(float x) { return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(x))); }

// The largest relative residual of the steps so far, as solve/residual.py measures it.
struct Residual {
  float worst = 0.0f;
  __device__ __forceinline__ void see(const NewtonArgs &a, const Step &step, bool there) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float gap = largest(there ? fabsf(step.next[p] - step.guess[p]) : 0.0f);
      const float size = largest(there ? fmaxf(fabsf(step.next[p]), fabsf(step.guess[p])) : 0.0f);
      const float ratio = gap * reciprocal(fmaxf(size < INFINITY ? size : 0.0f, fmaxf(a.floor[p], 1.17549435e-38f)));
      worst = ratio <= worst ? worst : ratio < INFINITY ? ratio : INFINITY;
    }
  }
  __device__ __forceinline__ void tell(const NewtonArgs &a) const {
    if (threadIdx.x == 0) atomicMax(a.worst, __float_as_uint(worst));
  }
};

extern "C" __global__ void __launch_bounds__(32) compose(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[RING * STREAM], rows[SIZE * PITCH], source[SIZE];
  Walk walk(a, ring);
  const Place &place = walk.place;
  const Map map = {rows, source, place.slice};
  map.begin(threadIdx.x);
  Residual residual;
  walk.arrive<1>();
  Step step = walk.evaluate(place.begin);
#pragma unroll 1
  for (int t = place.begin; t < place.end; t++) {
    walk.arrive<2>();                             // the map of the steps before is there, too
    const Step later = walk.evaluate(t + 1);      // beside the products; of no meaning behind the last step
    const Slopes slopes = walk.slopes(step);
    residual.see(a, step, place.there);
    float sum[PARTS][COLUMNS], of_source[PARTS];
    if (place.there) {
#pragma unroll
      for (int q = 0; q < PARTS; q++) {
        of_source[q] = step.next[q] - step.guess[q];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[q][c] = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; p++) map.add(sum[q], of_source[q], slopes.by_own[q][p], p * UNITS + place.unit);
      }
#pragma unroll
      for (int j = 0; j < UNITS; j++)
#pragma unroll
        for (int q = 0; q < PARTS; q++) {
          float entry = 0.0f;                     // of the Jacobian
#pragma unroll
          for (int p = 0; p < PRODUCTS; p++) entry = fmaf(slopes.by_product[q][p], walk.w[p][j], entry);
          map.add(sum[q], of_source[q], entry, j);
        }
    }
    __syncwarp();                                 // all have read the map
    if (place.there)
#pragma unroll
      for (int q = 0; q < PARTS; q++) map.put(q * UNITS + place.unit, sum[q], of_source[q]);
    walk.fetch();
    step = later;
  }
  __syncwarp();
  map.store(a.maps, a.sources, blockIdx.x);
  residual.tell(a);
}

// The initial state, at the head of those that are found.
__device__ __forceinline__ void put_initial(const NewtonArgs &a, const Place &place) {
  if (place.link != 0 || !place.there || place.slice != 0) return;
#pragma unroll
  for (int p = 0; p < PARTS; p++)
    a.found[p][(index_t)place.sequence * UNITS + place.unit] = a.origin[(index_t)place.sequence * SIZE + p * UNITS + place.unit];
}

extern "C" __global__ void __launch_bounds__(32) apply(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[RING * STREAM], moves[2][QUADS * 4];
  Walk walk(a, ring);
  const Place &place = walk.place;
  const index_t at_link = (index_t)place.link * a.batch + place.sequence;
  float delta[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) delta[p] = place.there ? a.starts[at_link * SIZE + p * UNITS + place.unit] : 0.0f;
  for (int i = threadIdx.x; i < 2 * QUADS * 4; i += 32) moves[0][i] = 0.0f;
  __syncwarp();
  put_initial(a, place);
  const float box = place.there ? fmaxf(fabsf(a.origin[(index_t)place.sequence * SIZE + place.unit]), 1.0f) : 1.0f;
  const bool writer = place.there && place.slice == 0;
  index_t to = ((index_t)(place.begin + 1) * a.batch + place.sequence) * UNITS + place.unit;
  walk.arrive<1>();
  Step step = walk.evaluate(place.begin);
#pragma unroll 1
  for (int t = place.begin; t < place.end; t++) {
    float *const move = moves[t & 1], y[PRODUCTS], behind[PARTS];
    if (writer) move[place.unit] = delta[0];
    walk.arrive<2>();
    const Step later = walk.evaluate(t + 1);
    const Slopes slopes = walk.slopes(step);
    walk.multiply(y, move);
#pragma unroll
    for (int q = 0; q < PARTS; q++) {
      const float jump = step.next[q] - step.guess[q];
      float carried = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) carried = fmaf(slopes.by_own[q][p], delta[p], carried);
#pragma unroll
      for (int p = 0; p < PRODUCTS; p++) carried = fmaf(slopes.by_product[q][p], y[p], carried);
      if (!(fabsf(carried + jump) < INFINITY)) carried = 0.0f;   // it has overflowed: the jump alone moves this state
      float state = step.next[q] + carried;
      if (BOUNDED && q == 0) state = fminf(fmaxf(state, -box), box);
      if (writer) a.found[q][to] = state;
      behind[q] = carried + jump;
    }
#pragma unroll
    for (int q = 0; q < PARTS; q++) delta[q] = behind[q];
    to += (index_t)a.batch * UNITS;
    walk.fetch();
    step = later;
  }
}

extern "C" __global__ void __launch_bounds__(32) finish(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[RING * STREAM];
  Walk walk(a, ring);
  const Place &place = walk.place;
  Residual residual;
  put_initial(a, place);
#pragma unroll 1
  for (int t = place.begin; t < place.end; t++) {
    walk.arrive<1>();
    const Step step = walk.evaluate(t);
    residual.see(a, step, place.there);
    const index_t token = (index_t)t * a.batch + place.sequence;
    if (place.there && place.slice == 0) {
#pragma unroll
      for (int p = 0; p < PARTS; p++) a.found[p][(token + a.batch) * UNITS + place.unit] = step.next[p];
      if (a.saved)
#pragma unroll
        for (int k = 0; k < SAVED; k++) a.saved[(token * SAVED + k) * UNITS + place.unit] = step.saved[k];
    }
    walk.fetch();
  }
  residual.tell(a);
}
