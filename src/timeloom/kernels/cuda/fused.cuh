// Sweeps of a step that was compiled: what its forward and its adjoint kernel share. A block walks one row, a stretch of
// one sequence. What a step does is generated (compile/emit_cuda.py): a source defines the sizes, includes this file,
// then has `struct Step`, then includes fused_forward.cuh or fused_adjoint.cuh.
//
//   THREADS, RING             threads of a block; steps whose inputs are on the chip
//   PARTS, SIZE               parts of the state, and their widths together
//   PART_WIDTHS, PART_OFFSETS widths of the parts, and where each begins in a state as it lies in memory
//   PART_PLACES, ROOM         where each begins on the chip, and how many floats a state takes there
//   INPUTS, WRITTEN           widths of the inputs and of what an adjoint step writes out
//   MATRICES, VECTORS         how many weights and per-unit vectors there are
//   AT_...                    where things lie in shared memory, in floats
//   DECAYING                  bits of the parts that keep something of themselves
//
// A unit belongs to SLICES lanes of a warp, which share its products: lane `slice` multiplies every SLICES-th group of
// four terms, then sums go over the lanes, so that all of them know them and compute the same. How many lanes, depends on
// the width of a loop: values of one width stay with the same thread all the time, in its registers.
#pragma once
#include "elements.cuh"
typedef long long index_t;
#define WARPS ((THREADS + 31) / 32)
#define WARPS_IN_FOURS ((WARPS + 3) / 4 * 4)

struct FusedArgs {
  const index_t *sequence, *begin, *end;          // (rows)
  const index_t *lengths;                         // (B): adjoint with a lead: where sequences end
  const unsigned char *resets;                    // (T, B) or NULL: the state is `origin` before such a step
  const float *origin;                            // (B, SIZE): the state at a reset, and where a lead begins
  const float *final;                             // (B, SIZE): adjoint with a lead: the gradient at a sequence's end
  const float *inputs;                            // (T, B, INPUTS)
  float *starts;                                  // (rows, SIZE): in without a lead; out with one: what it found
  float *ends;                                    // (rows, SIZE): out
  float *decay;                                   // (rows, SIZE) or NULL: what units keep of themselves along the stretch
  const float *incoming;                          // adjoint: (T, B, incoming_width) gradient on states, or NULL
  float *written;                                 // adjoint: (T, B, WRITTEN), or NULL
  float *reset_grads;                             // adjoint: (rows, SIZE) or NULL: gradient that flowed into resets
  float *states[PARTS];                           // (T + 1, B, part); forward: written unless NULL; adjoint: read
  const float *weights[MATRICES + 1];             // stacks of matrices, and packed ones
  const float *vectors[VECTORS + 1];              // per-unit vectors
  index_t batch, lead, incoming_width;
};

__device__ constexpr int part_width[PARTS] = PART_WIDTHS, part_place[PARTS] = PART_PLACES, part_offset[PARTS] = PART_OFFSETS;

INLINE void meet() { __syncthreads(); }

// ---- sums over lanes ---------------------------------------------------------------------------------------------------

template <int SLICES> INLINE float over_slices(float x) {
#pragma unroll
  for (int lanes = 1; lanes < SLICES; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}
// The sum over a row: each warp leaves its own, and whoever needs the whole adds them up behind the next barrier.
template <int SLICES> INLINE void leave_total(float *total, float x) {
#pragma unroll
  for (int lanes = SLICES; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  if (threadIdx.x % 32 == 0) total[threadIdx.x / 32] = x;
}
INLINE float whole(const float *total) {
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < WARPS_IN_FOURS; i += 4) {
    const float4 some = *(const float4 *)(total + i);
    sum[0] += some.x, sum[1] += some.y, sum[2] += some.z, sum[3] += some.w;
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// ---- products ------------------------------------------------------------------------------------------------------------

// Four terms of a vector in shared memory from `term` on, zero beyond its end.
template <int TERMS, bool ALIGNED> INLINE float4 four_of(const float *vector, int term) {
  if (ALIGNED && TERMS % 4 == 0) return term < TERMS ? *(const float4 *)(vector + term) : float4{};
  float4 four = {};
  if (term < TERMS) four.x = vector[term];
  if (term + 1 < TERMS) four.y = vector[term + 1];
  if (term + 2 < TERMS) four.z = vector[term + 2];
  if (term + 3 < TERMS) four.w = vector[term + 3];
  return four;
}

// COUNT matrices of BLOCKS blocks, each of which maps TERMS numbers to OUTPUTS units. TRANSPOSED: they lie in memory as
// matrices that map OUTPUTS to TERMS.
template <int COUNT_, int BLOCKS, int OUTPUTS, int TERMS_, int SLICES, bool TRANSPOSED> struct Shape {
  static constexpr int COUNT = COUNT_, TERMS = TERMS_;
  static constexpr int WIDTH = BLOCKS * OUTPUTS, GROUPS = (TERMS + 4 * SLICES - 1) / (4 * SLICES);
  static constexpr int UNITS = (WIDTH * SLICES + THREADS - 1) / THREADS;      // of a thread
  static INLINE int unit(int i) { return threadIdx.x / SLICES + i * (THREADS / SLICES); }
  static INLINE int term(int group) { return 4 * ((int)threadIdx.x % SLICES + SLICES * group); }
  static INLINE int begin(int unit) { return BLOCKS == 1 ? 0 : unit / OUTPUTS * TERMS; }
  static INLINE float given(const float *w, int which, int unit, int term) {
    if (unit >= WIDTH || term >= TERMS) return 0.0f;
    if (!TRANSPOSED) return w[(index_t)(which * WIDTH + unit) * TERMS + term];
    return w[(index_t)((which * BLOCKS + unit / OUTPUTS) * TERMS + term) * OUTPUTS + unit % OUTPUTS];
  }
};

// Where the weights are for all steps. `four(i, unit, which, group)` are this lane's.
template <class S> struct InRegisters {
  static constexpr int UNROLL = S::GROUPS;
  float w[S::UNITS][S::COUNT][S::GROUPS][4];
  INLINE void load(const float *from, float *) {
#pragma unroll
    for (int i = 0; i < S::UNITS; i++)
#pragma unroll
      for (int c = 0; c < S::COUNT; c++)
#pragma unroll
        for (int g = 0; g < S::GROUPS; g++)
#pragma unroll
          for (int k = 0; k < 4; k++) w[i][c][g][k] = S::given(from, c, S::unit(i), S::term(g) + k);
  }
  INLINE float4 four(int i, int, int c, int g) const { return {w[i][c][g][0], w[i][c][g][1], w[i][c][g][2], w[i][c][g][3]}; }
};
// [matrix][group of four terms][unit][4], the units so far apart that the lanes of a unit meet different banks.
template <class S, int SLICES> struct InShared {
  static constexpr int STRIDE = SLICES > 1 ? (S::WIDTH + 7) / 8 * 8 + (SLICES < 8 ? 8 / SLICES : 1) : S::WIDTH;
  static constexpr int ROWS = S::GROUPS * SLICES, UNROLL = 8;
  const float *w;
  INLINE void load(const float *from, float *room) {
    w = room;
    for (int at = threadIdx.x; at < S::COUNT * ROWS * S::WIDTH; at += THREADS) {
      const int unit = at % S::WIDTH, row = at / S::WIDTH % ROWS, c = at / S::WIDTH / ROWS;
#pragma unroll
      for (int k = 0; k < 4; k++)
        room[(index_t)((c * ROWS + row) * STRIDE + unit) * 4 + k] = S::given(from, c, unit, 4 * row + k);
    }
  }
  INLINE float4 four(int, int unit, int c, int g) const {
    return *(const float4 *)(w + ((c * ROWS + S::term(g) / 4) * STRIDE + unit) * 4);
  }
};
// The same order in memory, which the host has put them in: neighbouring units read neighbouring addresses.
template <class S> struct InMemory {
  static constexpr int ROWS = (S::TERMS + 3) / 4, UNROLL = 8;
  const float *w;
  INLINE void load(const float *from, float *) { w = from; }
  INLINE float4 four(int, int unit, int c, int g) const {
    const int row = S::term(g) / 4;
    return row < ROWS ? __ldg((const float4 *)(w + ((index_t)(c * ROWS + row) * S::WIDTH + unit) * 4)) : float4{};
  }
};

// sums[c] += this lane's share of the products of matrices FIRST ... FIRST + COUNT with a vector, for the thread's i-th
// unit, or for a unit that it has instead where there is none.
template <class S, bool ALIGNED, int FIRST, int COUNT, class Weights>
INLINE void multiply(float *sums, const Weights &weights, int i, int unit, const float *vector) {
  float part[COUNT][2] = {};
  vector += S::begin(unit);
#pragma unroll(Weights::UNROLL)
  for (int g = 0; g < S::GROUPS; g++) {
    const float4 x = four_of<S::TERMS, ALIGNED>(vector, S::term(g));
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      const float4 w = weights.four(i, unit, FIRST + c, g);
      part[c][0] = fmaf(w.x, x.x, part[c][0]), part[c][1] = fmaf(w.y, x.y, part[c][1]);
      part[c][0] = fmaf(w.z, x.z, part[c][0]), part[c][1] = fmaf(w.w, x.w, part[c][1]);
    }
  }
#pragma unroll
  for (int c = 0; c < COUNT; c++) sums[c] += part[c][0] + part[c][1];
}

// ---- whole states ----------------------------------------------------------------------------------------------------

// each(i, at): number i of a state as it lies in memory, and where it is on the chip. Each thread has the same ones always.
template <class Each> INLINE void for_state(const Each &each) {
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    for (int i = threadIdx.x; i < part_width[part]; i += THREADS) each(part_offset[part] + i, part_place[part] + i);
}
INLINE void save_state(float *to, index_t row, const float *state) {
  for_state([&](int i, int at) { to[row * SIZE + i] = state[at]; });
}
// A part that keeps nothing of itself has decayed to zero after any step, and over no steps it is what it was.
INLINE void save_decay(const FusedArgs &a, index_t row, const float *decay, bool empty) {
  if (!a.decay) return;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    for (int i = threadIdx.x; i < part_width[part]; i += THREADS)
      a.decay[row * SIZE + part_offset[part] + i] =
          (DECAYING >> part & 1) ? decay[part_place[part] + i] : empty ? 1.0f : 0.0f;
}
// Copies beside the arithmetic, of 16 bytes where addresses allow it.
template <int COUNT, bool FOURS = COUNT % 4 == 0> INLINE void copy_vector(float *to, const float *from) {
  constexpr int FLOATS = FOURS ? 4 : 1;
#pragma unroll
  for (int i = 0; i < (COUNT / FLOATS + THREADS - 1) / THREADS; i++) {
    const int at = (threadIdx.x + i * THREADS) * FLOATS;
    if (at < COUNT) copy_ahead<4 * FLOATS>(address_of(to + at), from + at);
  }
}
