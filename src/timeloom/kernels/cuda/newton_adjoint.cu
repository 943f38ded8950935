// The gradients' linear recurrence by the same maps: λ[t-1] = J[t]ᵀ (λ[t] + incoming[t]), chunks of time last one first.
// `compose_adjoint` makes of every chunk the map from the gradient behind it to that before it, from the gates' values
// that the forward pass has left. `chain` then finds the gradient behind every chunk.
#include "newton.cuh"
#include "newton_chain.cuh"

#define HAS(bits, part) ((bits) >> (part) & 1)
#define STREAM ((SAVED + 2 * PARTS + 1) * LANES)  // gates' values, states before and after, what comes in
#define SLOPES ((PRODUCTS + 3) / 4 * 4)           // slopes of one part of a unit, padded

extern "C" __global__ void __launch_bounds__(32) compose_adjoint(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[RING * STREAM], rows[SIZE * PITCH], source[SIZE], slopes_of[UNITS * PARTS * SLOPES];
  const Place place(a, true);
  const Map map = {rows, source, place.slice};
  float w[PRODUCTS][UNITS], vectors[VECTORS > 0 ? VECTORS : 1];   // columns of the weights
#pragma unroll
  for (int q = 0; q < PRODUCTS; q++)
#pragma unroll
    for (int i = 0; i < UNITS; i++) w[q][i] = place.there ? a.weights[(q * UNITS + i) * UNITS + place.unit] : 0.0f;
  load_vectors(vectors, a, place);
  map.begin(threadIdx.x);
  for (int i = threadIdx.x; i < RING * STREAM; i += 32) ring[i] = 0.0f;
  __syncwarp();
  const int last = place.end - 1;                 // steps are numbered from the last one
  auto slot = [&](int step) { return ring + step % RING * STREAM + place.unit; };
  auto fetch = [&](int step) {
    const int t = last - step;
    const index_t token = (index_t)t * a.batch + place.sequence;
    if (place.there && place.slice == 0 && t >= place.begin) {
      float *to = slot(step);
#pragma unroll
      for (int k = 0; k < SAVED; k++, to += LANES) copy_ahead<4>(address_of(to), a.saved + (token * SAVED + k) * UNITS + place.unit);
#pragma unroll
      for (int p = 0; p < PARTS; p++, to += LANES)
        if (HAS(BEFORE, p)) copy_ahead<4>(address_of(to), a.states[p] + token * UNITS + place.unit);
#pragma unroll
      for (int p = 0; p < PARTS; p++, to += LANES)
        if (HAS(AFTER, p)) copy_ahead<4>(address_of(to), a.states[p] + (token + a.batch) * UNITS + place.unit);
      if (a.incoming) copy_ahead<4>(address_of(to), a.incoming + token * UNITS + place.unit);
    }
    copies_end();
  };
  for (int step = 0; step < RING - 1; step++) fetch(step);
#pragma unroll 1
  for (int step = 0; step < place.end - place.begin; step++) {
    wait_for_copies<RING - 2>();
    __syncwarp();                                 // this step's values are there, and the map of those behind it
    const float *in = slot(step);
    float saved[SAVED > 0 ? SAVED : 1], before[PARTS], after[PARTS];
#pragma unroll
    for (int k = 0; k < SAVED; k++, in += LANES) saved[k] = *in;
#pragma unroll
    for (int p = 0; p < PARTS; p++, in += LANES) before[p] = *in;
#pragma unroll
    for (int p = 0; p < PARTS; p++, in += LANES) after[p] = *in;
    const Slopes slopes(saved, before, after, vectors);
    if (place.there && place.slice == 0) {
      source[place.unit] += *in;
#pragma unroll
      for (int q = 0; q < PARTS; q++)
#pragma unroll
        for (int p = 0; p < PRODUCTS; p++) slopes_of[(place.unit * PARTS + q) * SLOPES + p] = slopes.by_product[q][p];
    }
    __syncwarp();
    float sum[PARTS][COLUMNS], of_source[PARTS];
    if (place.there) {
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        of_source[p] = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[p][c] = 0.0f;
#pragma unroll
        for (int q = 0; q < PARTS; q++) map.add(sum[p], of_source[p], slopes.by_own[q][p], q * UNITS + place.unit);
      }
#pragma unroll
      for (int i = 0; i < UNITS; i++)
#pragma unroll
        for (int q = 0; q < PARTS; q++) {
          const float *const of_unit = slopes_of + (i * PARTS + q) * SLOPES;
          const float4 four = quad(of_unit);      // no cell has more than four products
          float entry = 0.0f;                     // of the transposed Jacobian
#pragma unroll
          for (int p = 0; p < PRODUCTS; p++) entry = fmaf(part_of(four, p), w[p][i], entry);
          map.add(sum[0], of_source[0], entry, q * UNITS + i);
        }
    }
    __syncwarp();                                 // all have read the map
    if (place.there)
#pragma unroll
      for (int p = 0; p < PARTS; p++) map.put(p * UNITS + place.unit, sum[p], of_source[p]);
    fetch(step + RING - 1);
  }
  __syncwarp();
  map.store(a.maps, a.sources, blockIdx.x);
}
