// What happens between two sweeps, on the starts and ends of all links: the residual, and corrections by the decay.
// Arrays are (links, batch, parts, n), links in marching order. The readable twin is solve/residual.py.
typedef long long index_t;

#define INFINITY __int_as_float(0x7f800000)

struct ChainArgs {
  const float *starts, *ends;
  const float *decay;                             // what each unit keeps of itself over a link
  const float *bound;                             // (batch, parts, n) or NULL: the box that starts stay in
  float *moves;                                   // (links, ...): `carry` out: how far each start is off; `jumps`: in, or NULL
  float *corrected;                               // `carry`: out: the starts moved by that, or NULL
  float *worst;                                   // `jumps`: out, atomically: the largest relative jump (or move) of all
  int links, batch, parts, n, fading;
  float floor[2];                                 // what a part's scale is at least
};

// δ[p] = A[p-1] δ[p-1] + jump[p] for every unit by itself, one thread each.
extern "C" __global__ void __launch_bounds__(128) carry(const __grid_constant__ ChainArgs a) {
  const index_t width = (index_t)a.batch * a.parts * a.n, i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  const float box = a.bound ? a.bound[i] : INFINITY;
  float delta = 0.0f;
  a.moves[i] = 0.0f;
  if (a.corrected) a.corrected[i] = a.starts[i];
#pragma unroll 8
  for (int p = 1; p < a.links; p++) {
    const index_t at = p * width + i;
    const float end = a.ends[at - width], jump = end - a.starts[at];
    delta = fmaf(a.decay[at - width], delta, jump);
    if (!(fabsf(delta) < INFINITY)) delta = jump;
    a.moves[at] = delta;
    if (a.corrected) a.corrected[at] = fminf(fmaxf(end + (delta - jump), -box), box);
  }
}

#define LINKS 256   // links at a time

// One block for every sequence and part; a warp measures one link, then one warp compares them along the chain.
extern "C" __global__ void __launch_bounds__(256) jumps(const __grid_constant__ ChainArgs a) {
  __shared__ float largest[LINKS], gaps[LINKS];
  const int part = blockIdx.x % a.parts, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const index_t link = (index_t)a.batch * a.parts * a.n, own = (index_t)blockIdx.x * a.n;
  const float least = fmaxf(a.floor[part], 1.17549435e-38f);
  float so_far = 0.0f, worst = 0.0f;
  for (int from = 0; from < a.links; from += LINKS) {
    const int count = min(LINKS, a.links - from);
    for (int k = warp; k < count; k += 8) {
      const index_t at = (from + k) * link + own;
      const bool first = from + k == 0;
      float most = 0.0f, gap = 0.0f;
      for (int i = lane; i < a.n; i += 32) {
        const float start = a.starts[at + i], end = first ? start : a.ends[at - link + i];
        const float size = fmaxf(fabsf(start), fabsf(end)), jump = a.moves ? a.moves[at + i] : end - start;
        most = fmaxf(most, size < INFINITY ? size : 0.0f);
        gap = fabsf(jump) < INFINITY ? fmaxf(gap, fabsf(jump)) : INFINITY;
      }
#pragma unroll
      for (int lanes = 16; lanes; lanes /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
        gap = fmaxf(gap, __shfl_xor_sync(0xffffffffu, gap, lanes));
      }
      if (lane == 0) largest[k] = most, gaps[k] = gap;
    }
    __syncthreads();
    if (warp == 0)
      for (int k = lane; k < LINKS; k += 32) {
        float scale = k < count ? largest[k] : 0.0f;
        if (a.fading) {
#pragma unroll
          for (int lanes = 1; lanes < 32; lanes *= 2) {
            const float before = __shfl_up_sync(0xffffffffu, scale, lanes);
            if (lane >= lanes) scale = fmaxf(scale, before);
          }
          scale = fmaxf(scale, so_far);
          so_far = __shfl_sync(0xffffffffu, scale, 31);
        }
        if (k < count) worst = fmaxf(worst, gaps[k] / fmaxf(scale, least));
      }
    __syncthreads();
  }
  if (warp == 0) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) worst = fmaxf(worst, __shfl_xor_sync(0xffffffffu, worst, lanes));
    if (lane == 0) atomicMax((int *)a.worst, __float_as_int(worst));
  }
}
