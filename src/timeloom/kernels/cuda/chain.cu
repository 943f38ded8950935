// What happens between two sweeps, on the starts and ends of all links: the residual, and corrections by the decay.
// Arrays are (links, batch, parts, n), links in marching order. The readable twin is solve/residual.py.
typedef long long index_t;

#define INFINITY __int_as_float(0x7f800000)

#if __CUDA_ARCH__ >= 900
// Waits for all threads of a cluster; what they have written is there.
__device__ __forceinline__ void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif

struct ChainArgs {
  const float *starts, *ends;
  const float *decay;                             // what each unit keeps of itself over a link
  const float *bound;                             // (batch, parts, n) or NULL: the box that starts stay in
  float *moves;                                   // (links, ...): `carry` out: how far each start is off; `measure`: in, or NULL
  float *corrected;                               // `carry`: out: the starts moved by that, or NULL
  float *measured;                                // (links, batch, parts, 2): the largest value and jump (or move) of each
  float *worst;                                   // `compare`: out: the largest jump (or move) of all beside its scale; and
                                                  // the same if it is within the limit, else zero
  int links, batch, parts, n, fading;
  float floor[2];                                 // what scales of the first part and of the others are at least, beside values of 1
  float limit;
};

// δ[p] = A[p-1] δ[p-1] + jump[p] for every unit by itself. A block's lanes are units, its warps take turns along the chain,
// AHEAD links each: they read theirs side by side, tell each other where δ = 0 would lead and what becomes of another δ,
// and then walk their links from the δ that enters them.
#define AHEAD 16
#define WALKERS 8
__device__ __forceinline__ float carried(float decay, float delta, float jump) {
  const float next = fmaf(decay, delta, jump);
  return fabsf(next) < INFINITY ? next : jump;    // what overflows is forgotten
}

extern "C" __global__ void __launch_bounds__(32 * WALKERS) carry(const __grid_constant__ ChainArgs a) {
  __shared__ float ends_at[2][WALKERS][32], keeps[2][WALKERS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const index_t width = (index_t)a.batch * a.parts * a.n, own = (index_t)blockIdx.x * 32 + lane;
  const bool there = own < width;
  const index_t i = there ? own : width - 1;      // lanes behind the last unit read it, and write nothing
  const float box = a.bound ? a.bound[i] : INFINITY;
  if (there && warp == 0) {
    a.moves[i] = 0.0f;
    if (a.corrected) a.corrected[i] = a.starts[i];
  }
  float entering = 0.0f;                          // δ before the links of this round
#pragma unroll 1
  for (int base = 1, round = 0; base < a.links; base += AHEAD * WALKERS, round ^= 1) {
    const int from = base + AHEAD * warp;
    float start[AHEAD], end[AHEAD], decay[AHEAD], delta = 0.0f, kept = 1.0f;
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const index_t at = min(from + k, a.links - 1) * width + i;
      start[k] = a.starts[at], end[k] = a.ends[at - width], decay[k] = a.decay[at - width];
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      if (from + k >= a.links) break;
      const float jump = end[k] - start[k], next = fmaf(decay[k], delta, jump);
      kept = fabsf(next) < INFINITY ? kept * decay[k] : 0.0f;
      delta = fabsf(next) < INFINITY ? next : jump;
    }
    ends_at[round][warp][lane] = delta, keeps[round][warp][lane] = kept;
    __syncthreads();                              // the buffers of the round before are read no more
    delta = entering;
#pragma unroll
    for (int w = 0; w < WALKERS; w++) {
      const float then = carried(keeps[round][w][lane], entering, ends_at[round][w][lane]);
      entering = then;
      if (w + 1 == warp) delta = then;
    }
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      if (from + k >= a.links) break;
      const index_t at = (from + k) * width + i;
      const float jump = end[k] - start[k];
      delta = carried(decay[k], delta, jump);
      if (!there) continue;
      a.moves[at] = delta;
      if (a.corrected) a.corrected[at] = fminf(fmaxf(end[k] + (delta - jump), -box), box);
    }
  }
}

__device__ __forceinline__ float largest(float x) {   // of a warp
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

// The largest value and jump of one link, sequence and part, found by a warp; `which` numbers them.
__device__ __forceinline__ void measure_one(const ChainArgs &a, index_t which) {
  const int lane = threadIdx.x & 31, groups = a.batch * a.parts;
  const index_t at_link = (index_t)groups * a.n, at = which * a.n;   // which = link (batch parts) + sequence parts + part
  const bool first = which < groups;
  float most = 0.0f, gap = 0.0f;
#pragma unroll 4
  for (int i = lane; i < a.n; i += 32) {
    const float start = a.starts[at + i], end = first ? start : a.ends[at - at_link + i];
    const float size = fmaxf(fabsf(start), fabsf(end)), jump = a.moves ? a.moves[at + i] : end - start;
    most = fmaxf(most, size < INFINITY ? size : 0.0f);
    gap = fabsf(jump) < INFINITY ? fmaxf(gap, fabsf(jump)) : INFINITY;
  }
  most = largest(most), gap = largest(gap);
  if (lane == 0) a.measured[2 * which] = most, a.measured[2 * which + 1] = gap;
}

#define LAST 4                                    // links at the end that count as following each other

// The largest gap beside its scale, along the chain of each sequence and part, all in one block of 32 warps. They share
// the chains: several walk the pieces of one where there are few.
__device__ __forceinline__ void compare_all(const ChainArgs &a) {
  __shared__ float worst_of[32], most_of[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, groups = a.batch * a.parts;
  const int pieces = groups < 32 ? 32 / groups : 1, piece = warp % pieces;   // in the order in which links are walked
  const int rounds = (a.links + 31) / 32, first = rounds * piece / pieces, last = rounds * (piece + 1) / pieces;
  float worst = 0.0f, entry = 0.0f;               // entry: the largest value of the pieces before this one
  if (pieces > 1) {
    const int group = warp / pieces;
    float most = 0.0f;
    for (int round = first; round < last && group < groups; round++) {
      const int link = 32 * (a.fading ? round : rounds - 1 - round) + lane;
      if (link < a.links) most = fmaxf(most, a.measured[2 * ((index_t)link * groups + group)]);
    }
    most = largest(most);
    if (lane == 0) most_of[warp] = most;
    __syncthreads();
    entry = largest(warp - piece <= lane && lane < warp ? most_of[lane] : 0.0f);
  }
  for (int group = warp / pieces; group < groups; group += 32) {
    const float share = a.floor[group % a.parts > 0];
    const int end = a.links - LAST + lane;        // one of the last links
    const float at_end = lane < LAST && end >= 0 ? a.measured[2 * ((index_t)end * groups + group)] : 0.0f;
    float so_far = entry, behind = fmaxf(entry, largest(at_end));   // the largest value before the links at hand, and behind them
    for (int round = first; round < last; round++) {
      const int link = 32 * (a.fading ? round : rounds - 1 - round) + lane;
      float2 own = {0.0f, 0.0f};                  // its largest value, its gap
      if (link < a.links) own = ((const float2 *)a.measured)[(index_t)link * groups + group];
      float scale = own.x;
      if (a.fading) {
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          const float before = __shfl_up_sync(0xffffffffu, scale, lanes);
          if (lane >= lanes) scale = fmaxf(scale, before);
        }
        scale = fmaxf(scale, so_far);
        so_far = __shfl_sync(0xffffffffu, scale, 31);
      } else {
        float later = scale;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
          const float next = __shfl_down_sync(0xffffffffu, later, lanes);
          if (lane + lanes < 32) later = fmaxf(later, next);
        }
        later = fmaxf(later, behind);
        behind = __shfl_sync(0xffffffffu, later, 0);
        scale = fmaxf(scale, share * fminf(later, 1.0f));
      }
      worst = fmaxf(worst, own.y / fmaxf(scale, 1.17549435e-38f));
    }
  }
  worst = largest(worst);
  if (lane == 0) worst_of[warp] = worst;
  __syncthreads();
  if (warp == 0) {
    worst = largest(worst_of[lane]);
    if (lane == 0) a.worst[0] = worst, a.worst[1] = worst <= a.limit ? worst : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(256) measure(const __grid_constant__ ChainArgs a) {
  const index_t which = ((index_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  if (which < (index_t)a.links * a.batch * a.parts) measure_one(a, which);
}

extern "C" __global__ void __launch_bounds__(1024) compare(const __grid_constant__ ChainArgs a) { compare_all(a); }

// Both in one launch, for short chains: a cluster of blocks measures, and its last block compares.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TOGETHER 8
extern "C" __global__ void __cluster_dims__(TOGETHER, 1, 1) __launch_bounds__(1024) certify(const __grid_constant__ ChainArgs a) {
  const int all = a.links * a.batch * a.parts;
#pragma unroll 2
  for (int which = 32 * blockIdx.x + (threadIdx.x >> 5); which < all; which += 32 * TOGETHER) measure_one(a, which);
  meet_in_cluster();
  if (blockIdx.x == TOGETHER - 1) compare_all(a);
}
#endif
