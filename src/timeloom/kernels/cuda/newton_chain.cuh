// The affine maps of all links applied one after the other, a warp to a sequence: v ← map v + source. Every link starts
// from the v before it. With `ends`, what the links ended with, the starts are corrected instead: v is what each start
// lacks, and the sources are the jumps ends[p] − starts[p + 1].
//
// Maps come through a ring in shared memory. Loads to registers would not do: a warp can tell few of them apart, and so
// waits for the last ones where it needs the first.
#pragma once
#include "newton.cuh"
#define LINKS_AHEAD 8                             // links in the ring
#define ROW (SIZE % 8 == 4 ? SIZE : (SIZE + 3) / 4 * 4 + ((SIZE + 3) / 4 % 2 ? 0 : 4))   // so that rows meet different banks
#define LINK (SIZE * ROW + 2 * 32)                // numbers of a link: its map, then source and ends, or ends and starts
#define PIECE (SIZE % 4 == 0 ? 4 : 1)             // numbers of one copy

extern "C" __global__ void __launch_bounds__(32) chain(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[LINKS_AHEAD * LINK], operand[2][32];
  const int row = threadIdx.x, sequence = blockIdx.x;
  const bool there = row < SIZE, corrects = a.ends != nullptr;
  for (int i = row; i < LINKS_AHEAD * LINK; i += 32) ring[i] = 0.0f;   // of numbers that are never copied
  __syncwarp();
  auto slot = [&](int link) { return ring + link % LINKS_AHEAD * LINK; };
  auto fetch = [&](int link) {
    if (link < a.links) {
      const index_t at = (index_t)link * a.batch + sequence;
      float *const to = slot(link);
      const float *const from = a.maps + at * (SIZE * SIZE);
      for (int i = row * PIECE; i < SIZE * SIZE; i += 32 * PIECE)
        copy_ahead<4 * PIECE>(address_of(to + i / SIZE * ROW + i % SIZE), from + i);
      if (there) {
        copy_ahead<4>(address_of(to + SIZE * ROW + row), (corrects ? a.ends : a.sources) + at * SIZE + row);
        if (corrects && link + 1 < a.links)
          copy_ahead<4>(address_of(to + SIZE * ROW + 32 + row), a.starts + (at + a.batch) * SIZE + row);
      }
    }
    copies_end();
  };
  for (int link = 0; link < LINKS_AHEAD - 1; link++) fetch(link);
  float v = there && a.first ? a.first[(index_t)sequence * SIZE + row] : 0.0f;
  float before = there && corrects ? a.starts[(index_t)sequence * SIZE + row] : 0.0f;   // of this link's start
#pragma unroll 1
  for (int link = 0; link < a.links; link++) {
    operand[link & 1][row] = v;
    wait_for_copies<LINKS_AHEAD - 2>();
    __syncwarp();
    const float *const at = slot(link);
    const float given = at[SIZE * ROW + row], next = corrects ? at[SIZE * ROW + 32 + row] : 0.0f;
    const float source = corrects ? (link + 1 < a.links ? given - next : 0.0f) : given;
    if (there) a.starts[((index_t)link * a.batch + sequence) * SIZE + row] = before + v;
    before = next;
    float sums[4] = {};
    if (there)
#pragma unroll
      for (int j = 0; j < SIZE; j += 4) {
        const float4 four = quad(at + row * ROW + j), other = quad(&operand[link & 1][j]);
        sums[0] = fmaf(four.x, other.x, sums[0]), sums[1] = fmaf(four.y, other.y, sums[1]);
        sums[2] = fmaf(four.z, other.z, sums[2]), sums[3] = fmaf(four.w, other.w, sums[3]);
      }
    v = (sums[0] + sums[1]) + (sums[2] + sums[3]) + source;
    if (!(fabsf(v) < INFINITY)) v = source;       // the maps have overflowed
    fetch(link + LINKS_AHEAD - 1);
  }
}
