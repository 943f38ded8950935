// The affine maps of links, v → map v + source, in groups of `span` links; a warp has a group of one sequence.
// `chain` runs through a group, and tells what every link starts from. `gather` makes one map of a group, so that many
// links can be run through in three passes: gather the groups, chain them, and chain inside all of them side by side.
//
// Maps come through a ring in shared memory. Loads to registers would not do: a warp can tell few of them apart, and so
// waits for the last ones where it needs the first.
#pragma once
#include "newton.cuh"
#define LINKS_AHEAD 8                             // links in the ring
#define ROW (SIZE % 8 == 4 ? SIZE : (SIZE + 3) / 4 * 4 + ((SIZE + 3) / 4 % 2 ? 0 : 4))   // so that rows meet different banks
#define LINK (SIZE * ROW + 32)                    // numbers of a link: its map, then its source
#define PIECE (SIZE % 4 == 0 ? 4 : 1)             // numbers of one copy

// A group's links on their way.
struct Links {
  const NewtonArgs &a;
  float *ring;
  int sequence, first, count, fetched;
  const float *map, *source;                      // of the next link to be fetched
  __device__ __forceinline__ Links(const NewtonArgs &a, float *ring) : a(a), ring(ring), fetched(0) {
    sequence = blockIdx.x % a.batch, first = blockIdx.x / a.batch * a.span, count = min(a.span, a.links - first);
    const index_t at = (index_t)first * a.batch + sequence;
    map = a.maps + at * (SIZE * SIZE) + threadIdx.x * PIECE, source = a.sources + at * SIZE + threadIdx.x;
    for (int i = threadIdx.x; i < LINKS_AHEAD * LINK; i += 32) ring[i] = 0.0f;   // of numbers that are never copied
    __syncwarp();
    for (int link = 0; link < LINKS_AHEAD - 1; link++) fetch();
  }
  __device__ __forceinline__ const float *slot(int link) const { return ring + link % LINKS_AHEAD * LINK; }
  __device__ __forceinline__ void fetch() {
    if (fetched < count) {
      float *const to = ring + fetched % LINKS_AHEAD * LINK;
#pragma unroll
      for (int from = 0; from < SIZE * SIZE; from += 32 * PIECE) {
        const int i = from + threadIdx.x * PIECE;
        if (i < SIZE * SIZE) copy_ahead<4 * PIECE>(address_of(to + i / SIZE * ROW + i % SIZE), map + from);
      }
      if (threadIdx.x < SIZE) copy_ahead<4>(address_of(to + SIZE * ROW + threadIdx.x), source);
    }
    map += (index_t)a.batch * (SIZE * SIZE), source += (index_t)a.batch * SIZE, fetched++;
    copies_end();
  }
  __device__ __forceinline__ void arrive() const {
    wait_for_copies<LINKS_AHEAD - 2>();
    __syncwarp();
  }
};

extern "C" __global__ void __launch_bounds__(32) chain(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[LINKS_AHEAD * LINK], operand[2][32];
  Links links(a, ring);
  const int row = threadIdx.x;
  const bool there = row < SIZE;
  float v = there && a.first ? a.first[(index_t)blockIdx.x * SIZE + row] : 0.0f;
  float *start = a.starts + ((index_t)links.first * a.batch + links.sequence) * SIZE + row;
#pragma unroll 1
  for (int link = 0; link < links.count; link++) {
    operand[link & 1][row] = v;
    links.arrive();
    const float *const at = links.slot(link);
    const float source = at[SIZE * ROW + row];
    if (there) *start = v;
    start += (index_t)a.batch * SIZE;
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
    links.fetch();
  }
}

extern "C" __global__ void __launch_bounds__(32) gather(const __grid_constant__ NewtonArgs a) {
  __shared__ __align__(16) float ring[LINKS_AHEAD * LINK], rows[SIZE * PITCH], source[SIZE];
  const int slice = threadIdx.x % SPLIT, unit = threadIdx.x / SPLIT;
  const bool there = unit < UNITS;
  Links links(a, ring);
  const Map map = {rows, source, slice};
  map.begin(threadIdx.x);
#pragma unroll 1
  for (int link = 0; link < links.count; link++) {
    links.arrive();                               // the map of the links before is there, too
    const float *const at = links.slot(link);
    float sum[PARTS][COLUMNS] = {}, of_source[PARTS];
    if (there)
#pragma unroll
      for (int q = 0; q < PARTS; q++) {
        const float *const own = at + (q * UNITS + unit) * ROW;
        of_source[q] = at[SIZE * ROW + q * UNITS + unit];
#pragma unroll
        for (int k = 0; k < SIZE; k += 4) {
          const float4 four = quad(own + k);
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (k + i < SIZE) map.add(sum[q], of_source[q], part_of(four, i), k + i);
        }
      }
    __syncwarp();                                 // all have read the map
    if (there)
#pragma unroll
      for (int q = 0; q < PARTS; q++) map.put(q * UNITS + unit, sum[q], of_source[q]);
    links.fetch();
  }
  __syncwarp();
  map.store(a.gathered, a.gathered_sources, blockIdx.x);
}
