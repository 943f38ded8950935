// The affine maps of all links applied one after the other, a warp to a sequence: v ← map v + source. Every link starts
// from the v before it. With `ends`, what the links ended with, the starts are corrected instead: v is what each start
// lacks, and the sources are the jumps ends[p] − starts[p + 1].
#pragma once
#include "newton.cuh"
#define DEEP (SIZE > 16 ? 4 : 8)                  // links whose maps are on their way

extern "C" __global__ void __launch_bounds__(32) chain(const __grid_constant__ NewtonArgs a) {
  const int row = threadIdx.x, sequence = blockIdx.x;
  const bool there = row < SIZE;
  float map[DEEP][SIZE], source[DEEP];
  auto load = [&](int k, int link) {
    if (!there || link >= a.links) return;
    const index_t at = (index_t)link * a.batch + sequence;
    const float *const from = a.maps + (at * SIZE + row) * SIZE;
#pragma unroll
    for (int j = 0; j < SIZE; j += 4) {
      if (SIZE % 4 == 0) {
        const float4 four = quad(from + j);
#pragma unroll
        for (int i = 0; i < 4; i++) map[k][j + i < SIZE ? j + i : 0] = part_of(four, i);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (j + i < SIZE) map[k][j + i < SIZE ? j + i : 0] = from[j + i];
      }
    }
    if (!a.ends) source[k] = a.sources[at * SIZE + row];
    else if (link + 1 < a.links) source[k] = a.ends[at * SIZE + row] - a.starts[(at + a.batch) * SIZE + row];
  };
#pragma unroll
  for (int k = 0; k < DEEP; k++) {
    source[k] = 0.0f;
#pragma unroll
    for (int j = 0; j < SIZE; j++) map[k][j] = 0.0f;
    load(k, k);
  }
  float v = there && a.first ? a.first[(index_t)sequence * SIZE + row] : 0.0f;
  for (int from = 0; from < a.links; from += DEEP) {
#pragma unroll
    for (int k = 0; k < DEEP; k++) {
      const int link = from + k;
      if (link >= a.links) break;
      float *const start = a.starts + ((index_t)link * a.batch + sequence) * SIZE + row;
      if (there) *start = a.ends ? *start + v : v;
      float sums[4] = {};
#pragma unroll
      for (int j = 0; j < SIZE; j++) sums[j % 4] = fmaf(map[k][j], __shfl_sync(ALL, v, j), sums[j % 4]);
      v = (sums[0] + sums[1]) + (sums[2] + sums[3]) + source[k];
      if (!(fabsf(v) < INFINITY)) v = source[k];  // the maps have overflowed
      load(k, link + DEEP);
    }
  }
}
