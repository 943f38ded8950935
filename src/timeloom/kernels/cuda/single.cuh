// What the sweeps of single rows share: a row is walked by one block, or by a cluster of blocks, with the recurrent
// weights in registers as they are, in float32.
//
// A unit belongs to SLICES lanes of a warp; lane `slice` holds the weights of every SLICES-th group of four terms. A step
// is: read the operand from shared memory, multiply and add, sum over the slices by shuffles, and every lane of the unit
// has the products. Faster than the tensor cores as long as there are fewer rows than multiprocessors can hold.
//
// CLUSTER blocks share the units of one row. Each has all of the operand in its own shared memory; whoever computes a
// piece of it writes it to all of them.
//
// Compiled for one width: UNITS hidden units, padded to N, a multiple of CLUSTER 32 / SLICES and of 4 SLICES.
#pragma once
#include "functions.cuh"
#define OWN_UNITS (N / CLUSTER)                   // units of a block
#define THREADS (OWN_UNITS * SLICES)
typedef long long index_t;
#define GROUPS (N / 4 / SLICES)                   // groups of four terms that a lane multiplies

#if CLUSTER > 1
#define SHAPE __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
__device__ __forceinline__ int rank_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same place in the shared memory of every block, written by the lanes of a unit in turns.
__device__ __forceinline__ void put(float *at, float value, int slice) {
#pragma unroll
  for (int block = 0; block < CLUSTER; block += SLICES) {
    if (block + slice >= CLUSTER) break;
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(at)), "r"(block + slice));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
  }
}
#else
#define SHAPE __launch_bounds__(THREADS)
__device__ __forceinline__ int rank_in_cluster() { return 0; }
__device__ __forceinline__ void meet() { __syncthreads(); }
#endif

__device__ __forceinline__ bool inside(int unit) { return UNITS == N || unit < UNITS; }
// Four terms of a row of the weights, zero beyond; rows of whole groups are read in one piece.
__device__ __forceinline__ void load_terms(float *w, const float *row, int term, bool there) {
  if (UNITS % 4 == 0) {
    const float4 four = there && term < UNITS ? *(const float4 *)(row + term) : float4{};
    w[0] = four.x, w[1] = four.y, w[2] = four.z, w[3] = four.w;
    return;
  }
#pragma unroll
  for (int k = 0; k < 4; k++) w[k] = there && inside(term + k) ? row[term + k] : 0.0f;
}
__device__ __forceinline__ float over_slices(float x) {
#pragma unroll
  for (int lanes = 1; lanes < SLICES; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}
// values[slice] for SLICES values or more, without memory: what this lane stores where all lanes of a unit know all.
template <int COUNT> __device__ __forceinline__ float pick(const float *values, int from, int slice) {
  float x = values[from];
#pragma unroll
  for (int k = 1; k < SLICES; k++)
    if (from + k < COUNT) x = slice == k ? values[from + k] : x;
  return x;
}
#define COPIED (UNITS % 4 == 0 ? 4 : 1)           // floats of one copy
// This thread's copies of one step: of `VECTORS_IN` vectors, the block's own units.
template <int VECTORS_IN> struct Copies {
  static constexpr int PIECES = VECTORS_IN * (OWN_UNITS / COPIED), OWN = (PIECES + THREADS - 1) / THREADS;
  const float *from[OWN];                         // NULL where there is nothing to copy
  index_t stride[OWN];                            // floats from one step to the next
  decltype(address_of(nullptr)) to[OWN];          // in shared memory
  // place(vector): where the vector of step 0 lies, and its stride.
  template <class Place> __device__ __forceinline__ Copies(float *ring, const Place &place) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int at = (threadIdx.x + i * THREADS) * COPIED, vector = at / OWN_UNITS;
      const int unit = rank_in_cluster() * OWN_UNITS + at % OWN_UNITS;
      from[i] = nullptr, stride[i] = 0;
      if (vector < VECTORS_IN && inside(unit)) from[i] = place(vector, stride[i]);
      if (from[i]) from[i] += unit;
      to[i] = address_of(ring + vector * OWN_UNITS + at % OWN_UNITS);
    }
  }
  __device__ __forceinline__ void fetch(int step, bool there) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (there && from[i]) copy_ahead<4 * COPIED>(to[i] + step % RING * (VECTORS_IN * OWN_UNITS * 4), from[i]);
      if (from[i]) from[i] += stride[i];
    }
    copies_end();
  }
};
