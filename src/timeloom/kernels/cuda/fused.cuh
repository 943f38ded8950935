// Sweeps of a step that was compiled: what its forward and its adjoint kernel share. A block walks ROWS rows, each a
// stretch of one sequence. What a step does is generated (compile/emit_cuda.py): a source defines the sizes, includes this
// file, then has `struct Step`, then includes fused_forward.cuh or fused_adjoint.cuh.
//
//   THREADS, ROWS, RING       threads and rows of a block; steps whose inputs are on the chip
//   PARTS, SIZE               parts of the state, and their widths together
//   PART_WIDTHS, PART_OFFSETS widths of the parts, and where each begins in a state as it lies in memory
//   PART_PLACES, ROOM         where each begins on the chip, and how many floats a state takes there
//   INPUTS, WRITTEN           widths of the inputs and of what an adjoint step writes out
//   MATRICES, VECTORS         how many weights and per-unit vectors there are
//   AT_..., ROW_ROOM          where things of a row lie in shared memory, in floats, and how much all of them take
//   DECAYING                  bits of the parts that keep something of themselves
//
// A unit belongs to SLICES lanes of a warp, which share its products: lane `slice` multiplies every SLICES-th group of
// four terms, then sums go over the lanes. Of one row all lanes know the sums then, and compute the same. Of several rows,
// as many as there are slices, each lane knows those of its own row, and computes what the step does there: weights are
// read once for all rows, and nothing is computed twice. Values of one width stay with the same thread all the time, in
// its registers.
#pragma once
#include "elements.cuh"
typedef long long index_t;
#define WARPS ((THREADS + 31) / 32)
#define WARPS_IN_FOURS ((WARPS + 3) / 4 * 4)
#define OWN_ROW ((int)threadIdx.x % ROWS)         // of the block's rows, the one that this thread is about
#define IN_ROW ((int)threadIdx.x / ROWS)          // its number among the threads of that row

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
  index_t batch, lead, incoming_width, rows;
  const float *unless;                            // a certificate or NULL: nothing is swept where it is within its limit
  float limit;
};

__device__ constexpr int part_width[PARTS] = PART_WIDTHS, part_place[PARTS] = PART_PLACES, part_offset[PARTS] = PART_OFFSETS;

INLINE void meet() { __syncthreads(); }

// ---- sums over lanes ---------------------------------------------------------------------------------------------------

// From this lane's share of every row's sum to the whole sum of its own row.
template <int SLICES> INLINE float over_slices(float *of_rows) {
  if (ROWS == 1) {
#pragma unroll
    for (int lanes = 1; lanes < SLICES; lanes *= 2) of_rows[0] += __shfl_xor_sync(0xffffffffu, of_rows[0], lanes);
    return of_rows[0];
  }
#pragma unroll
  for (int half = ROWS / 2; half; half /= 2) {    // give half of the rows away, and take the shares of the others
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int row = 0; row < half; row++) {
      const float given = upper ? of_rows[row] : of_rows[row + half];
      const float kept = upper ? of_rows[row + half] : of_rows[row];
      of_rows[row] = kept + __shfl_xor_sync(0xffffffffu, given, half);
    }
  }
  return of_rows[0];
}
// The sum over a row: each warp leaves its own, and whoever needs the whole adds them up behind the next barrier.
template <int SLICES> INLINE void leave_total(float *total, float x) {
#pragma unroll
  for (int lanes = SLICES; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  if (threadIdx.x % 32 < ROWS) total[threadIdx.x / 32] = x;
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
  static constexpr int DEPTH = S::GROUPS * SLICES, UNROLL = 8;
  const float *w;
  INLINE void load(const float *from, float *room) {
    w = room;
    for (int at = threadIdx.x; at < S::COUNT * DEPTH * S::WIDTH; at += THREADS) {
      const int unit = at % S::WIDTH, fours = at / S::WIDTH % DEPTH, c = at / S::WIDTH / DEPTH;
#pragma unroll
      for (int k = 0; k < 4; k++)
        room[(index_t)((c * DEPTH + fours) * STRIDE + unit) * 4 + k] = S::given(from, c, unit, 4 * fours + k);
    }
  }
  INLINE float4 four(int, int unit, int c, int g) const {
    return *(const float4 *)(w + ((c * DEPTH + S::term(g) / 4) * STRIDE + unit) * 4);
  }
};
// The same order in memory, which the host has put them in: neighbouring units read neighbouring addresses.
template <class S> struct InMemory {
  static constexpr int DEPTH = (S::TERMS + 3) / 4, UNROLL = 8;
  const float *w;
  INLINE void load(const float *from, float *) { w = from; }
  INLINE float4 four(int, int unit, int c, int g) const {
    const int fours = S::term(g) / 4;
    return fours < DEPTH ? __ldg((const float4 *)(w + ((index_t)(c * DEPTH + fours) * S::WIDTH + unit) * 4)) : float4{};
  }
};

// sums[c][row] += this lane's share of the products of matrices FIRST ... FIRST + COUNT with a vector of every row, for
// the thread's i-th unit, or for a unit that it has instead where there is none. `vector` is that of the thread's own row.
template <class S, bool ALIGNED, int FIRST, int COUNT, class Weights>
INLINE void multiply(float (*sums)[ROWS], const Weights &weights, int i, int unit, const float *vector) {
  constexpr int CHAINS = ROWS == 1 ? 2 : 1;       // sums side by side, where there are few
  float part[COUNT][ROWS][CHAINS] = {};
  vector += S::begin(unit) - OWN_ROW * ROW_ROOM;
#pragma unroll(Weights::UNROLL)
  for (int g = 0; g < S::GROUPS; g++) {
    float4 x[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) x[row] = four_of<S::TERMS, ALIGNED>(vector + row * ROW_ROOM, S::term(g));
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      const float4 w = weights.four(i, unit, FIRST + c, g);
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        float &one = part[c][row][0], &two = part[c][row][CHAINS - 1];
        one = fmaf(w.x, x[row].x, one), two = fmaf(w.y, x[row].y, two);
        one = fmaf(w.z, x[row].z, one), two = fmaf(w.w, x[row].w, two);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < COUNT; c++)
#pragma unroll
    for (int row = 0; row < ROWS; row++)
      sums[c][row] += CHAINS == 1 ? part[c][row][0] : part[c][row][0] + part[c][row][CHAINS - 1];
}

// ---- whole states ----------------------------------------------------------------------------------------------------

// each(i, at): number i of the own row's state as it lies in memory, and where it is on the chip. Each thread has the
// same ones always.
template <class Each> INLINE void for_state(const Each &each) {
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    for (int i = IN_ROW; i < part_width[part]; i += THREADS / ROWS) each(part_offset[part] + i, part_place[part] + i);
}
INLINE void save_state(float *to, index_t row, const float *state) {
  for_state([&](int i, int at) { to[row * SIZE + i] = state[at]; });
}
// A part that keeps nothing of itself has decayed to zero after any step, and over no steps it is what it was.
INLINE void save_decay(const FusedArgs &a, index_t row, const float *decay, bool empty) {
  if (!a.decay) return;
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    for (int i = IN_ROW; i < part_width[part]; i += THREADS / ROWS)
      a.decay[row * SIZE + part_offset[part] + i] =
          (DECAYING >> part & 1) ? decay[part_place[part] + i] : empty ? 1.0f : 0.0f;
}
// Copies of the own row's vectors beside the arithmetic, of 16 bytes where addresses allow it.
template <int COUNT, bool FOURS = COUNT % 4 == 0> INLINE void copy_vector(float *to, const float *from) {
  constexpr int FLOATS = FOURS ? 4 : 1;
#pragma unroll
  for (int i = 0; i < (COUNT / FLOATS + THREADS / ROWS - 1) / (THREADS / ROWS); i++) {
    const int at = (IN_ROW + i * (THREADS / ROWS)) * FLOATS;
    if (at < COUNT) copy_ahead<4 * FLOATS>(address_of(to + at), from + at);
  }
}
// The most of all rows of the block: every warp has lanes of each of them.
INLINE int longest(int own) {
  int most = own;
#pragma unroll
  for (int lanes = 1; lanes < ROWS; lanes *= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, most, lanes);
    most = other > most ? other : most;
  }
  return most;
}
