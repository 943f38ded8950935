// What forward and adjoint sweeps share: the rows of a block, the operand that its warps exchange, the ring of inputs.
//
// A row is one stretch of one sequence. A block walks ROWS rows together, one step at a time. A warp owns TILE units
// with all their gates; its lane (g, t) owns the units g, g + 8 of the tile in the rows 2 t, 2 t + 1: four elements,
// numbered e = 2 (unit) + (row). The recurrent weights stay in registers for all steps; the vector that they multiply
// goes through shared memory, in two buffers, so that a step needs one barrier. Inputs are copied RING - 1 steps ahead
// by one more warp, 4 of its lanes to a row; of eight warps, which leave no registers for another one, each copies a row.
//
// Compiled for one width: UNITS hidden units, padded to N, a multiple of TILE.
#pragma once
#include "functions.cuh"
#include "cell.cuh"
#include "products.cuh"

#define WARPS (N / TILE)
#define COPIER (WARPS != 8)                       // whether one more warp copies
#define THREADS (32 * (WARPS + COPIER))
#define COPYING (COPIER ? 4 : 32)                 // lanes that copy a row
#define SLABS (N / 16)                            // pieces of 16 terms of one product

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0, %0;" ::"n"(THREADS) : "memory"); }

struct Lane {
  int g, t, unit, row0;                           // unit: the first of the two; row0: the block's first row
  __device__ __forceinline__ Lane() {
    const int lane = threadIdx.x & 31;
    g = lane >> 2, t = lane & 3, unit = TILE * (threadIdx.x >> 5) + g, row0 = blockIdx.x * ROWS;
  }
  __device__ __forceinline__ int unit_of(int e) const { return unit + 8 * (e >> 1); }
  __device__ __forceinline__ int column_of(int e) const { return 2 * t + (e & 1); }
};

__device__ __forceinline__ bool inside(int unit) { return UNITS == N || unit < UNITS; }

// ---- weights in registers ------------------------------------------------------------------------------------------

struct Weights { unsigned hi[4]; unsigned lo[HALF ? 1 : 4]; };

// Four terms of one row of a matrix, zero beyond: by one load where rows are aligned to it.
__device__ __forceinline__ float4 four_terms(const float *row, int term, bool there) {
  if (UNITS % 4 == 0) return there && term < UNITS ? *(const float4 *)(row + term) : float4{};
  auto one = [&](int i) { return there && term + i < UNITS ? row[term + i] : 0.0f; };
  return {one(0), one(1), one(2), one(3)};
}
// The 16 x 16 piece of an n x n matrix of rows `unit` (this warp's) and terms 16 slab ...
__device__ __forceinline__ void load_weights(Weights &w, const Lane &lane, int slab, const float *matrix) {
#pragma unroll
  for (int half = 0; half < 2; half++) {          // rows g, g + 8; terms 4t, 4t + 1 in one register, 4t + 2, 4t + 3 in another
    const int unit = lane.unit + 8 * half;
    const float4 four = four_terms(matrix + unit * UNITS, 16 * slab + 4 * lane.t, inside(unit));
    const float terms[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int two = 0; two < 2; two++) {
      half_bits hi[2], lo[2];
      split(terms[2 * two], hi[0], lo[0]), split(terms[2 * two + 1], hi[1], lo[1]);
      const int i = half + 2 * two;
      w.hi[i] = pair(hi[0], hi[1]);
      if (!HALF) w.lo[HALF ? 0 : i] = pair(lo[0], lo[1]);
    }
  }
}

// ---- the operand in shared memory: [row][product][piece of 4 terms][hi 4][lo 4] halves ---------------------------------

#define PIECE (HALF ? 4 : 8)                      // halves of a piece
#define REGION ((N / 4 + (HALF ? 15 : 7)) / (HALF ? 16 : 8) * (HALF ? 16 : 8))   // pieces of one product's terms
// A row's length in halves: so that the lanes that load together, and those that store together, meet different banks.
// For the same reason the pieces of a row are numbered anew: piece i of row r is where piece i ^ (r & 6) would be.
#define OPERAND_ROW(products) (((products) * REGION + 4) * PIECE)

struct Operand {                                  // where this lane writes and reads; two buffers, by the step's parity
  half_bits *write[2];                            // its first row, first and second unit
  const half_bits *read[2];                       // row g, even and odd slabs
  int length;
  __device__ __forceinline__ Operand(half_bits *base, int length, const Lane &lane) : length(length) {
    const int own = HALF ? 0 : 2 * lane.t, other = HALF ? 0 : lane.g & 6, piece = lane.unit >> 2;
    half_bits *const row = base + 2 * lane.t * length + (lane.unit & 3);
    write[0] = row + (piece ^ own) * PIECE, write[1] = row + ((piece + 2) ^ own) * PIECE;
    const half_bits *const from = base + lane.g * length + (lane.t ^ (other & 2)) * PIECE;
    read[0] = from + (other & 4) * PIECE, read[1] = from - (other & 4) * PIECE;
  }
  __device__ __forceinline__ int buffer(int step) const { return (step & 1) * ROWS * length; }
  __device__ __forceinline__ void put(int buffer, int e, int product, float x) const {
    half_bits hi, lo;
    split(x, hi, lo);
    half_bits *at = write[e >> 1] + buffer + (e & 1) * length + product * REGION * PIECE;
    at[0] = hi;
    if (!HALF) at[4] = lo;
  }
  __device__ __forceinline__ const half_bits *slab(int buffer, int product, int j) const {
    return read[j & 1] + buffer + (product * REGION + 4 * j) * PIECE;
  }
};

// Sums of one product: hi hi, and hi lo + lo hi, in one or two pieces where registers are left for that.
#define SUMS (HALF ? 1 : PRODUCTS * SLABS > 12 ? 2 : 3)
__device__ __forceinline__ void multiply_slab(float (*sums)[4], const Weights &w, const half_bits *at) {
  if (HALF) {
    const uint2 v = *(const uint2 *)at;
    multiply(sums[0], w.hi, v.x, v.y);
  } else {
    const uint4 v = *(const uint4 *)at;
    multiply(sums[0], w.hi, v.x, v.y);
    multiply(sums[SUMS > 1 ? 1 : 0], w.hi, v.z, v.w);
    multiply(sums[SUMS > 1 ? SUMS - 1 : 0], w.lo, v.x, v.y);
  }
}
__device__ __forceinline__ float total(const float (*sums)[4], int e) {
  if (SUMS == 1) return sums[0][e];
  const float small = SUMS == 2 ? sums[SUMS > 1 ? 1 : 0][e] : sums[SUMS > 1 ? 1 : 0][e] + sums[SUMS - 1][e];
  return fmaf(small, 1.0f / SHIFT, sums[0][e]);
}

// ---- powers of two that bring numbers of any size into the range of fp16 ---------------------------------------------

__device__ __forceinline__ unsigned exponents(float a, float b) {   // of the largest |x| of two rows, in one word
  return (__float_as_uint(a) >> 23) | ((__float_as_uint(b) >> 23) << 16);
}
__device__ __forceinline__ unsigned over_units(unsigned packed) {   // largest over the 16 units of a warp
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) packed = __vmaxu2(packed, __shfl_xor_sync(0xffffffffu, packed, lanes));
  return __vmaxu2(packed, 0x000f000fu);                             // at least 2^-112, so that all powers are normal
}
__device__ __forceinline__ unsigned exponent_of(unsigned packed, int row) { return (packed >> (16 * row)) & 0xff; }
__device__ __forceinline__ float into_range(unsigned exponent) {    // times this: below 2^15
  return __uint_as_float(min(268u - exponent, 254u) << 23);
}
__device__ __forceinline__ float out_of_range(unsigned exponent) { return __uint_as_float((exponent - 14u) << 23); }

// ---- the ring of inputs: vectors of UNITS numbers for every row and step ----------------------------------------------

#define COPIED (UNITS % 4 == 0 ? 4 : 1)           // floats of one copy
#define RING_ROW(vectors) ((vectors) * N + 4)     // floats; the 4 keep the rows of a warp's lanes in different banks

// Row of the block that this thread copies, and its share of one vector.
__device__ __forceinline__ int copied_row() { return COPIER ? (threadIdx.x & 31) >> 2 : threadIdx.x >> 5; }
__device__ __forceinline__ void copy_vector(float *to, const float *from) {
  const int own = threadIdx.x % COPYING;
#pragma unroll
  for (int i = 0; i < UNITS / COPIED; i += COPYING)
    if (i + own < UNITS / COPIED) copy_ahead<4 * COPIED>(address_of(to + (i + own) * COPIED), from + (i + own) * COPIED);
}
__device__ __forceinline__ void clear_shared(void *shared, int bytes) {
  for (int i = threadIdx.x; i < bytes / 4; i += THREADS) ((unsigned *)shared)[i] = 0;
}
typedef long long index_t;

__device__ __forceinline__ int longest_row(const index_t *begin, const index_t *end, int row0, int rows) {
  int longest = 0;
  for (int row = row0; row < min(row0 + ROWS, rows); row++) longest = max(longest, (int)(end[row] - begin[row]));
  return longest;
}
