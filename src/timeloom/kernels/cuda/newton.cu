// A step of Newton's method on all states at once (DEER): see newton.cuh. With states s guessed,
//     f[t] = f(s[t-1], u[t])      J[t] = ∂f/∂s at s[t-1]      δ[t] = J[t] δ[t-1] + f[t] − s[t]      s ← s + δ.
// `compose` makes of every chunk the map from δ before it to δ behind it, and measures the residual f[t] − s[t];
// `chain` finds δ before every chunk; `apply` walks the chunks once more and writes the new states. `finish` evaluates
// the states that are left: f[t], what the adjoint needs, and the residual. The readable twin is kernels/newton.py.
#include "newton.cuh"
#include "newton_chain.cuh"

#define STREAM ((INPUTS + PARTS) * LANES)         // numbers of a step: inputs, and the state before it

// Walks a chunk: the inputs and guessed states of its steps come through a ring in shared memory.
struct Walk {
  const NewtonArgs &a;
  const Place place;
  float *ring;
  float w[PRODUCTS][UNITS], vectors[VECTORS > 0 ? VECTORS : 1];

  __device__ __forceinline__ Walk(const NewtonArgs &a, float *ring) : a(a), place(a, false), ring(ring) {
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
      for (int j = 0; j < UNITS; j++) w[q][j] = place.there ? a.weights[(q * UNITS + place.unit) * UNITS + j] : 0.0f;
    load_vectors(vectors, a, place);
    for (int i = threadIdx.x; i < RING * STREAM; i += 32) ring[i] = 0.0f;
    __syncwarp();
    for (int t = place.begin; t < place.begin + RING - 1; t++) fetch(t);
  }
  __device__ __forceinline__ float *slot(int t) const { return ring + t % RING * STREAM; }
  __device__ __forceinline__ void fetch(int t) const {      // inputs of step t, and the state before it
    const index_t token = (index_t)t * a.batch + place.sequence;
    if (place.there && place.slice == 0 && t <= place.end) {
      float *const to = slot(t) + place.unit;
#pragma unroll
      for (int k = 0; k < INPUTS; k++)
        if (t < place.end) copy_ahead<4>(address_of(to + k * LANES), a.inputs + (token * INPUTS + k) * UNITS + place.unit);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        const bool known = t == 0 || !a.states[0];
        const float *const from = known ? a.origin + ((index_t)place.sequence * PARTS + p) * UNITS : a.states[p] + token * UNITS;
        copy_ahead<4>(address_of(to + (INPUTS + p) * LANES), from + place.unit);
      }
    }
    copies_end();
  }
  __device__ __forceinline__ void arrive() const {          // of the step at hand and of the state behind it
    wait_for_copies<RING - 3>();
    __syncwarp();
  }
  __device__ __forceinline__ const float *h(int t) const { return slot(t) + INPUTS * LANES; }
  __device__ __forceinline__ float state(int t, int p) const { return h(t)[p * LANES + place.unit]; }
  // W_q v of all products, for v in shared memory
  __device__ __forceinline__ void multiply(float *y, const float *v) const {
#pragma unroll
    for (int q = 0; q < PRODUCTS; q++) y[q] = 0.0f;
#pragma unroll
    for (int j = 0; j < UNITS; j += 4) {
      const float4 four = quad(v + j);
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int q = 0; q < PRODUCTS; q++)
          if (j + k < UNITS) y[q] = fmaf(w[q][j + k < UNITS ? j + k : 0], part_of(four, k), y[q]);
    }
  }
  __device__ __forceinline__ void evaluate(int t, float *before, float *next, float *saved) const {
    float y[PRODUCTS], u[INPUTS > 0 ? INPUTS : 1], keep[PARTS];
    multiply(y, h(t));
#pragma unroll
    for (int k = 0; k < INPUTS; k++) u[k] = slot(t)[k * LANES + place.unit];
#pragma unroll
    for (int p = 0; p < PARTS; p++) before[p] = state(t, p);
    advance(y, u, vectors, before, next, saved, keep);
  }
};

// The largest of all lanes; of numbers that are not negative, where NaN is the largest.
__device__ __forceinline__ float largest(float x) { return __uint_as_float(__reduce_max_sync(ALL, __float_as_uint(x))); }

// The largest relative residual of the steps so far, as solve/residual.py measures it.
struct Residual {
  float worst = 0.0f;
  __device__ __forceinline__ void see(const NewtonArgs &a, const float *next, const float *guess, bool there) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float gap = largest(there ? fabsf(next[p] - guess[p]) : 0.0f);
      const float size = largest(there ? fmaxf(fabsf(next[p]), fabsf(guess[p])) : 0.0f);
      const float ratio = gap / fmaxf(size < INFINITY ? size : 0.0f, fmaxf(a.floor[p], 1.17549435e-38f));
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
#pragma unroll 1
  for (int t = place.begin; t < place.end; t++) {
    walk.arrive();                                // the map of the steps before is there, too
    float before[PARTS], next[PARTS], saved[SAVED > 0 ? SAVED : 1], guess[PARTS];
    walk.evaluate(t, before, next, saved);
    const Slopes slopes(saved, before, next, walk.vectors);
#pragma unroll
    for (int p = 0; p < PARTS; p++) guess[p] = walk.state(t + 1, p);
    residual.see(a, next, guess, place.there);
    float sum[PARTS][COLUMNS], of_source[PARTS];
    if (place.there) {
#pragma unroll
      for (int q = 0; q < PARTS; q++) {
        of_source[q] = next[q] - guess[q];
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
    walk.fetch(t + RING - 1);
  }
  __syncwarp();
  map.store(a, place);
  residual.tell(a);
}

extern "C" __global__ void __launch_bounds__(32) apply(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[RING * STREAM], moves[2][(QUADS * 4)];
  Walk walk(a, ring);
  const Place &place = walk.place;
  const index_t at_link = (index_t)place.link * a.batch + place.sequence;
  float delta[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) delta[p] = place.there ? a.starts[at_link * SIZE + p * UNITS + place.unit] : 0.0f;
  for (int i = threadIdx.x; i < 2 * (QUADS * 4); i += 32) moves[0][i] = 0.0f;
  __syncwarp();
  const float box = place.there ? fmaxf(fabsf(a.origin[(index_t)place.sequence * SIZE + place.unit]), 1.0f) : 1.0f;
#pragma unroll 1
  for (int t = place.begin; t < place.end; t++) {
    float *const move = moves[t & 1];
    if (place.there && place.slice == 0) move[place.unit] = delta[0];
    walk.arrive();
    float before[PARTS], next[PARTS], saved[SAVED > 0 ? SAVED : 1], y[PRODUCTS];
    walk.evaluate(t, before, next, saved);
    const Slopes slopes(saved, before, next, walk.vectors);
    walk.multiply(y, move);
    float behind[PARTS];
#pragma unroll
    for (int q = 0; q < PARTS; q++) {
      const float guess = walk.state(t + 1, q), jump = next[q] - guess;
      float carried = 0.0f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) carried = fmaf(slopes.by_own[q][p], delta[p], carried);
#pragma unroll
      for (int p = 0; p < PRODUCTS; p++) carried = fmaf(slopes.by_product[q][p], y[p], carried);
      if (!(fabsf(carried + jump) < INFINITY)) carried = 0.0f;   // it has overflowed: the jump alone moves this state
      float state = next[q] + carried;
      if (BOUNDED && q == 0) state = fminf(fmaxf(state, -box), box);
      if (place.there && place.slice == 0)
        a.found[q][((index_t)(t + 1) * a.batch + place.sequence) * UNITS + place.unit] = state;
      behind[q] = carried + jump;
    }
#pragma unroll
    for (int q = 0; q < PARTS; q++) delta[q] = behind[q];
    walk.fetch(t + RING - 1);
  }
}

extern "C" __global__ void __launch_bounds__(32) finish(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[RING * STREAM];
  Walk walk(a, ring);
  const Place &place = walk.place;
  Residual residual;
  if (place.link == 0 && place.there && place.slice == 0)
#pragma unroll
    for (int p = 0; p < PARTS; p++)
      a.found[p][(index_t)place.sequence * UNITS + place.unit] = a.origin[(index_t)place.sequence * SIZE + p * UNITS + place.unit];
#pragma unroll 1
  for (int t = place.begin; t < place.end; t++) {
    walk.arrive();
    float before[PARTS], next[PARTS], saved[SAVED > 0 ? SAVED : 1], guess[PARTS];
    walk.evaluate(t, before, next, saved);
#pragma unroll
    for (int p = 0; p < PARTS; p++) guess[p] = walk.state(t + 1, p);
    residual.see(a, next, guess, place.there);
    const index_t token = (index_t)t * a.batch + place.sequence;
    if (place.there && place.slice == 0) {
#pragma unroll
      for (int p = 0; p < PARTS; p++) a.found[p][(token + a.batch) * UNITS + place.unit] = next[p];
      if (a.saved)
#pragma unroll
        for (int k = 0; k < SAVED; k++) a.saved[(token * SAVED + k) * UNITS + place.unit] = saved[k];
    }
    walk.fetch(t + RING - 1);
  }
  residual.tell(a);
}
