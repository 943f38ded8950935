// What the kernels of newton.cu and newton_adjoint.cu share: a warp walks a chunk of time, and the affine map of the
// chunk lies in shared memory.
//
// SIZE = PARTS UNITS numbers of a state, at most 32. A unit belongs to SPLIT lanes; lane `slice` of them has COLUMNS
// columns of the unit's rows of the map. Entry (q, i) of a state, part q of unit i, is row q UNITS + i.
//
// What a step does to a unit: next_q[i] = F_q(y_0[i], …; own state) with y_p = W_p h, so that, with the slopes of F by
// its products and by the unit's own state, which the cell's `pull` tells for g = e_q,
//     J[(q, i), (0, j)] = Σ_p slope[q][p] W_p[i][j] + own[q][0] [i = j]        J[(q, i), (1, i)] = own[q][1].
// Jacobians are never stored: their entries are made of weights in registers where they are multiplied.
#pragma once
#include "cell.cuh"
typedef long long index_t;
#define INFINITY __int_as_float(0x7f800000)
#define SIZE (PARTS * UNITS)
#define LANES (32 / SPLIT)                        // units that a warp has room for
#define COLUMNS ((SIZE + 4 * SPLIT - 1) / (4 * SPLIT) * 4)
#define PITCH (COLUMNS * SPLIT % 8 ? COLUMNS * SPLIT : COLUMNS * SPLIT + 4)   // so that rows meet different banks
#define QUADS ((UNITS + 3) / 4)                   // groups of four units
#define RING 8                                    // steps on the chip
#define ALL 0xffffffffu

struct NewtonArgs {
  const float *inputs;                            // (T, B, INPUTS n)
  const float *weights;                           // (PRODUCTS n, n)
  const float *vectors;                           // (VECTORS, n)
  const float *origin;                            // (B, SIZE): the initial state
  const float *states[2];                         // (T + 1, B, n) each: those guessed, or NULL: the initial one everywhere
  float *found[2];                                // (T + 1, B, n) each: new states behind every step, out
  float *saved;                                   // (T, B, SAVED n): `finish` out, or NULL; the adjoint: in
  const float *incoming;                          // (T, B, n) or NULL: the loss's gradient on part 0 after every step
  float *maps, *sources;                          // (links, B, SIZE, SIZE) and (links, B, SIZE): v → map v + source
  float *gathered, *gathered_sources;             // (groups, B, SIZE, SIZE) and (groups, B, SIZE): those of whole groups
  float *starts;                                  // (links, B, SIZE): what each link starts from
  const float *first;                             // (groups, B, SIZE) or NULL (zero): what each group starts from
  unsigned *worst;                                // the largest relative residual, as the bits of a float
  int steps, batch, chunk, links, span;           // span: links of a group
  float floor[2];                                 // what a part's scale is at least
};

struct Place {                                    // the chunk of this warp, and this lane's place in it
  int slice, unit, link, sequence, begin, end;
  bool there;
  __device__ __forceinline__ Place(const NewtonArgs &a, bool backwards) {
    slice = threadIdx.x % SPLIT, unit = threadIdx.x / SPLIT, there = unit < UNITS;
    link = blockIdx.x / a.batch, sequence = blockIdx.x % a.batch;
    begin = (backwards ? a.links - 1 - link : link) * a.chunk, end = min(begin + a.chunk, a.steps);
  }
};

__device__ __forceinline__ float4 quad(const float *at) { return *(const float4 *)at; }
__device__ __forceinline__ float part_of(const float4 &four, int k) {
  return k == 0 ? four.x : k == 1 ? four.y : k == 2 ? four.z : four.w;
}

// The map of a chunk so far, and its source: rows as this lane has them, columns slice COLUMNS … .
struct Map {
  float *rows, *source;
  int slice;
  __device__ __forceinline__ void begin(int lane) const {
    for (int i = lane; i < SIZE * PITCH; i += 32) rows[i] = i / PITCH == i % PITCH ? 1.0f : 0.0f;
    for (int i = lane; i < SIZE; i += 32) source[i] = 0.0f;
  }
  __device__ __forceinline__ const float *at(int row) const { return rows + row * PITCH + slice * COLUMNS; }
  // sum += factor row
  __device__ __forceinline__ void add(float *sum, float &sum_of_source, float factor, int row) const {
    const float *const from = at(row);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) {
      const float4 four = quad(from + c);
      sum[c] = fmaf(factor, four.x, sum[c]), sum[c + 1] = fmaf(factor, four.y, sum[c + 1]);
      sum[c + 2] = fmaf(factor, four.z, sum[c + 2]), sum[c + 3] = fmaf(factor, four.w, sum[c + 3]);
    }
    sum_of_source = fmaf(factor, source[row], sum_of_source);
  }
  __device__ __forceinline__ void put(int row, const float *sum, float sum_of_source) const {
    float *const to = rows + row * PITCH + slice * COLUMNS;
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) *(float4 *)(to + c) = {sum[c], sum[c + 1], sum[c + 2], sum[c + 3]};
    if (slice == 0) source[row] = sum_of_source;
  }
  __device__ __forceinline__ void store(float *maps, float *sources, index_t at) const {
    for (int i = threadIdx.x; i < SIZE * SIZE; i += 32) maps[at * (SIZE * SIZE) + i] = rows[i / SIZE * PITCH + i % SIZE];
    for (int i = threadIdx.x; i < SIZE; i += 32) sources[at * SIZE + i] = source[i];
  }
};

// ∂next_q by the unit's products and by its own state.
struct Slopes {
  float by_product[PARTS][PRODUCTS], by_own[PARTS][PARTS];
  __device__ __forceinline__ Slopes(const float *saved, const float *before, const float *after, const float *vectors) {
#pragma unroll
    for (int q = 0; q < PARTS; q++) {
      float g[PARTS] = {}, grads[GRADS], keep[PARTS];
      g[q] = 1.0f;
      pull(saved, before, after, vectors, g, by_product[q], grads, by_own[q], keep);
    }
  }
};

__device__ __forceinline__ void load_vectors(float *vectors, const NewtonArgs &a, const Place &place) {
#pragma unroll
  for (int k = 0; k < VECTORS; k++) vectors[k] = place.there ? a.vectors[k * UNITS + place.unit] : 0.0f;
}
