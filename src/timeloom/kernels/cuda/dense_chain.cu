// A chain of affine maps, one block for each sequence: v[p + 1] = v[p] R[p] + b[p], for rows v of S numbers.
//
// SLICES groups of threads share the terms of a sum; the matrix of the next link is read while this one is multiplied.
// Compiled for one size S, padded to P, a multiple of 32.
typedef long long index_t;
#define SLICES 8
#define TERMS ((S + SLICES - 1) / SLICES)
#define THREADS (SLICES * P)

struct DenseChainArgs {
  const float *matrices;                          // (links, batch, S, S)
  const float *offsets;                           // (links, batch, S)
  const float *first;                             // (batch, S) or NULL: zero
  float *found;                                   // (links, batch, S): out, v of every link
  int links, batch;
};

extern "C" __global__ void __launch_bounds__(THREADS) dense_chain(const __grid_constant__ DenseChainArgs a) {
  __shared__ float v[S], partial[SLICES][P];
  const int column = threadIdx.x % P, slice = threadIdx.x / P;
  const bool writes = slice == 0 && column < S;
  auto place = [&](int link) { return (index_t)link * a.batch + blockIdx.x; };
  float ahead[TERMS], offset = 0.0f;
  auto fetch = [&](int link) {
    if (link + 1 >= a.links) return;              // what comes behind the last link is not asked for
    const float *const matrix = a.matrices + place(link) * (S * S) + column;
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
      const int term = slice + SLICES * k;
      ahead[k] = term < S && column < S ? matrix[term * S] : 0.0f;
    }
    if (writes) offset = a.offsets[place(link) * S + column];
  };
  fetch(0);
  if (writes) {
    const float begin = a.first ? a.first[blockIdx.x * S + column] : 0.0f;
    v[column] = begin, a.found[place(0) * S + column] = begin;
  }
  __syncthreads();
#pragma unroll 1
  for (int link = 0; link + 1 < a.links; link++) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < TERMS; k++) {
      const int term = slice + SLICES * k;
      sum = fmaf(term < S ? v[term] : 0.0f, ahead[k], sum);
    }
    const float added = offset;
    fetch(link + 1);
    partial[slice][column] = sum;
    __syncthreads();
    if (writes) {
      sum = added;
#pragma unroll
      for (int k = 0; k < SLICES; k++) sum += partial[k][column];
      v[column] = sum, a.found[place(link + 1) * S + column] = sum;
    }
    __syncthreads();
  }
}
