// Gradients of a layer's weights and biases, all in one pass over the gate gradients d (steps, gates):
//
//   w_ih = Σ d[i, gates of inputs] ⊗ x[i],   w_hh = Σ d[i, gates of states] ⊗ before[i],   biases = Σ d[i]
//
// The two matrices are two sides of one launch. Each is cut into tiles of GATES x VALUES numbers, and time into shares: a
// block adds up one tile over one share, and `add_up` adds up the shares. A block takes STEPS steps at a time. Their gate
// gradients and values, side by side, are COLUMNS columns: each thread reads four of them, in every SLOTS-th step. They
// are scaled per GROUP columns, split into halves and laid down in shared memory, in one of two buffers, while the tensor
// cores multiply what is in the other. The readable twin is kernels/cuda/weight_sums.py.
//
// Compiled for a tile: GATES, VALUES, and how many warps share its rows and columns, WARPS_DOWN and WARPS_ACROSS. ALIGNED:
// whether all rows may be read in vectors of four.
#include "split_halves.cuh"
typedef long long index_t;

#define COLUMNS (GATES + VALUES)                  // also the threads of a block
#define STEPS 32
#define SLOTS 4
#define READS (STEPS / SLOTS)
#define GROUP 16
#define GROUPS (COLUMNS / GROUP)
#define HALVES (STEPS * COLUMNS)                  // of all numbers in a buffer: the high ones, followed by the low ones
#define ROWS_OF_WARP (GATES / WARPS_DOWN)
#define COLUMNS_OF_WARP (VALUES / WARPS_ACROSS)
#define DOWN (ROWS_OF_WARP / 16)                  // products of a warp: 16 rows and two times 8 columns
#define ACROSS (COLUMNS_OF_WARP / 16)
#define TILE_FLOATS (GATES * VALUES + GATES)      // of a tile's sums, and of its rows' sums of gate gradients
#define INFINITY __int_as_float(0x7f800000)

struct WeightSumsArgs {
  const float *grads;                             // (steps, ...)
  const float *values[2];                         // x, and the states before each step: (steps, columns)
  float *partial;                                 // (shares, tiles, TILE_FLOATS)
  float *weights[2], *biases[2];                  // out: (rows, columns) and (rows); biases may be NULL
  int steps, share, shares;                       // share: steps of a block, a multiple of STEPS
  int rows, apart, gap;                           // of the states' side, rows from `apart` on lie `gap` further behind
  int grads_stride, columns[2], strides[2], tiles[2];
};

struct Place {                                    // of a tile
  int side, row0, column0;
  __device__ __forceinline__ Place(const WeightSumsArgs &a, int tile) {
    side = tile >= a.tiles[0];
    const int own = side ? tile - a.tiles[0] : tile, across = (a.columns[side] + VALUES - 1) / VALUES;
    row0 = own / across * GATES, column0 = own % across * VALUES;
  }
};

// What a thread reads: four neighbouring columns, in its slot of every SLOTS steps.
struct Reader {
  const float *at;                                // in the first of the steps read next
  index_t stride;
  int quad, slot, count, cut, gap;                // of the four, `count` exist; those from `cut` on lie `gap` further behind
  float4 read[READS], sum;
  __device__ __forceinline__ Reader(const WeightSumsArgs &a, const Place &place, int first) {
    quad = threadIdx.x % (COLUMNS / 4), slot = threadIdx.x / (COLUMNS / 4);
    const bool of_gates = quad < GATES / 4;
    const int column = of_gates ? place.row0 + 4 * quad : place.column0 + 4 * quad - GATES;
    count = min(max((of_gates ? a.rows : a.columns[place.side]) - column, 0), 4);
    gap = of_gates && place.side ? a.gap : 0;
    cut = a.apart - column;
    stride = of_gates ? a.grads_stride : a.strides[place.side];
    at = (of_gates ? a.grads : a.values[place.side]) + (first + slot) * stride + column;
    if (ALIGNED && cut <= 0) at += gap;
    sum = {0.0f, 0.0f, 0.0f, 0.0f};
  }
  __device__ __forceinline__ float one(const float *row, int i) const { return i < count ? row[i < cut ? i : i + gap] : 0.0f; }
  __device__ __forceinline__ void fetch(int left) {  // left: steps of the share from here on
#pragma unroll
    for (int i = 0; i < READS; i++) {
      const float *const row = at + i * (SLOTS * stride);
      const bool there = slot + SLOTS * i < left && count;
      if (ALIGNED) read[i] = there ? *(const float4 *)row : float4{};
      else read[i] = there ? float4{one(row, 0), one(row, 1), one(row, 2), one(row, 3)} : float4{};
    }
    at += STEPS * stride;
  }
  // Sums of the columns; the largest finite magnitude in the GROUP columns that four lanes read.
  __device__ __forceinline__ float look() {
    float most = 0.0f;
    float4 now = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < READS; i++) {
      const float4 x = read[i];
      now.x += x.x, now.y += x.y, now.z += x.z, now.w += x.w;
      most = fmaxf(fmaxf(fmaxf(most, fabsf(x.x)), fmaxf(fabsf(x.y), fabsf(x.z))), fabsf(x.w));   // a NaN is left out
    }
    if (most == INFINITY) {
      most = 0.0f;
      auto consider = [&](float x) { most = fmaxf(most, fabsf(x) < INFINITY ? fabsf(x) : 0.0f); };
#pragma unroll
      for (int i = 0; i < READS; i++) consider(read[i].x), consider(read[i].y), consider(read[i].z), consider(read[i].w);
    }
    sum.x += now.x, sum.y += now.y, sum.z += now.z, sum.w += now.w;
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }
};

// Where eight halves begin: rows of COLUMNS, whose pieces of eight are numbered anew, so that the same piece of eight rows
// that follow each other lies in different banks.
__device__ __forceinline__ int place_of(int step, int column) { return step * COLUMNS + ((column >> 3 ^ (step & 7)) << 3); }

__device__ __forceinline__ void lay_down(half_bits *to, const Reader &reader, float scale) {
#pragma unroll
  for (int i = 0; i < READS; i++) {
    const float4 x = reader.read[i];
    const Pair front = split_pair(scale * x.x, scale * x.y), back = split_pair(scale * x.z, scale * x.w);
    half_bits *const at = to + place_of(reader.slot + SLOTS * i, 4 * reader.quad) + 4 * (reader.quad & 1);
    *(Quad *)at = {front.high, back.high};
    *(Quad *)(at + HALVES) = {front.low, back.low};
  }
}

// A warp's part of the tile.
struct Sums {
  float total[DOWN][2 * ACROSS][4];
  int row0, column0, of_gates[DOWN], of_values[ACROSS];   // where this lane's rows of the first 16 steps begin
  bool busy;
  __device__ __forceinline__ Sums(const WeightSumsArgs &a, const Place &place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, matrix = lane / 8;
    row0 = warp / WARPS_ACROSS * ROWS_OF_WARP, column0 = warp % WARPS_ACROSS * COLUMNS_OF_WARP;
    busy = place.row0 + row0 < a.rows && place.column0 + column0 < a.columns[place.side];
#pragma unroll
    for (int m = 0; m < DOWN; m++)
      of_gates[m] = place_of(lane % 8 + 8 * (matrix >> 1), row0 + 16 * m + 8 * (matrix & 1));
#pragma unroll
    for (int p = 0; p < ACROSS; p++)
      of_values[p] = place_of(lane % 8 + 8 * (matrix & 1), GATES + column0 + 16 * p + 8 * (matrix >> 1));
#pragma unroll
    for (int i = 0; i < DOWN * 2 * ACROSS * 4; i++) (&total[0][0][0])[i] = 0.0f;
  }
  // Add the products of a buffer; undo: of the scales of its groups.
  __device__ __forceinline__ void add(const half_bits *from, const float *undo) {
    float found[DOWN][2 * ACROSS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step += 16) {
      unsigned high[ACROSS][4], low[ACROSS][4];
#pragma unroll
      for (int p = 0; p < ACROSS; p++) {
        load_halves_turned(high[p], from + of_values[p] + step * COLUMNS);
        load_halves_turned(low[p], from + of_values[p] + step * COLUMNS + HALVES);
      }
#pragma unroll
      for (int m = 0; m < DOWN; m++) {
        unsigned gates_high[4], gates_low[4];
        load_halves_turned(gates_high, from + of_gates[m] + step * COLUMNS);
        load_halves_turned(gates_low, from + of_gates[m] + step * COLUMNS + HALVES);
#pragma unroll
        for (int j = 0; j < 2 * ACROSS; j++) multiply_halves(found[m][j], gates_low, high[j / 2] + 2 * (j % 2));
#pragma unroll
        for (int j = 0; j < 2 * ACROSS; j++) multiply_halves(found[m][j], gates_high, low[j / 2] + 2 * (j % 2));
#pragma unroll
        for (int j = 0; j < 2 * ACROSS; j++) multiply_halves(found[m][j], gates_high, high[j / 2] + 2 * (j % 2));
      }
    }
#pragma unroll
    for (int m = 0; m < DOWN; m++) {
      const float of_rows = undo[(row0 + 16 * m) / GROUP];
#pragma unroll
      for (int p = 0; p < ACROSS; p++) {
        const float of_columns = undo[(GATES + column0 + 16 * p) / GROUP];
        const float first = fminf(of_rows, of_columns), then = fmaxf(of_rows, of_columns);   // so nothing overflows midway
#pragma unroll
        for (int e = 0; e < 8; e++) {
          float &sum = total[m][2 * p + e / 4][e % 4];
          sum = fmaf(found[m][2 * p + e / 4][e % 4] * first, then, sum);
        }
      }
    }
  }
  __device__ __forceinline__ void write(float *tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < DOWN; m++)
#pragma unroll
      for (int j = 0; j < 2 * ACROSS; j++) {
        float *const to = tile + (row0 + 16 * m + lane / 4) * VALUES + column0 + 8 * j + 2 * (lane % 4);
        *(float2 *)to = {total[m][j][0], total[m][j][1]};
        *(float2 *)(to + 8 * VALUES) = {total[m][j][2], total[m][j][3]};
      }
  }
};

extern "C" __global__ void __launch_bounds__(COLUMNS) sum_weights(const __grid_constant__ WeightSumsArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  half_bits *const halves = (half_bits *)shared;                  // [2][high, low][STEPS][COLUMNS]
  float *const most_of = (float *)(halves + 4 * HALVES);          // [2][SLOTS][GROUPS]: the largest magnitudes
  float *const undo = most_of + 2 * SLOTS * GROUPS;               // [2][GROUPS]: the inverse of the scales
  const int tiles = a.tiles[0] + a.tiles[1], tile = blockIdx.x % tiles, first = blockIdx.x / tiles * a.share;
  const int last = min(first + a.share, a.steps), group = (threadIdx.x % (COLUMNS / 4)) / 4;
  const Place place(a, tile);
  Reader reader(a, place, first);
  Sums sums(a, place);
  auto look = [&](int buffer) {
    const float most = reader.look();
    if (threadIdx.x % 4 == 0) most_of[(buffer * SLOTS + reader.slot) * GROUPS + group] = most;
  };
  auto lay = [&](int buffer) {
    const float *const own = most_of + buffer * SLOTS * GROUPS + group;
    const float most = fmaxf(fmaxf(own[0], own[GROUPS]), fmaxf(own[2 * GROUPS], own[3 * GROUPS]));
    if (threadIdx.x % 4 == 0 && reader.slot == 0) undo[buffer * GROUPS + group] = undo_of(most);
    lay_down(halves + buffer * 2 * HALVES, reader, scale_of(most));
  };
  reader.fetch(last - first);
  look(0);
  __syncthreads();
  lay(0);
  reader.fetch(last - first - STEPS);
  look(1);
  __syncthreads();
  int buffer = 0;
#pragma unroll 1
  for (int step = first; step < last; step += STEPS, buffer ^= 1) {   // one barrier for STEPS steps
    if (step + STEPS < last) lay(buffer ^ 1);
    reader.fetch(last - step - 2 * STEPS);
    if (sums.busy) sums.add(halves + buffer * 2 * HALVES, undo + buffer * GROUPS);
    look(buffer);
    __syncthreads();
  }
  float *const to = a.partial + (index_t)blockIdx.x * TILE_FLOATS;
  if (sums.busy) sums.write(to);
  if (place.column0 == 0) {
    float *const of_slots = (float *)shared;                      // [SLOTS][COLUMNS]
    *(float4 *)(of_slots + reader.slot * COLUMNS + 4 * reader.quad) = reader.sum;
    __syncthreads();
    const float *const own = of_slots + threadIdx.x;
    if (threadIdx.x < GATES)
      to[GATES * VALUES + threadIdx.x] = (own[0] + own[COLUMNS]) + (own[2 * COLUMNS] + own[3 * COLUMNS]);
  }
}

// Adds up the shares: 32 lanes with four numbers each, the warps take turns along the shares.
#define ADDERS 8
extern "C" __global__ void __launch_bounds__(32 * ADDERS) add_up(const __grid_constant__ WeightSumsArgs a) {
  extern __shared__ __align__(128) unsigned char shared[];
  float *const found = (float *)shared;                           // [ADDERS][128]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t all = (index_t)(a.tiles[0] + a.tiles[1]) * TILE_FLOATS, at = 128 * (index_t)blockIdx.x;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  if (at + 4 * lane < all) {
    const float *const from = a.partial + at + 4 * lane;
#pragma unroll 8
    for (int share = warp; share < a.shares; share += ADDERS) {
      const float4 x = *(const float4 *)(from + share * all);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  ((float4 *)found)[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= 128 || at + threadIdx.x >= all) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < ADDERS; i++) total += found[128 * i + threadIdx.x];
  const Place place(a, (int)((at + threadIdx.x) / TILE_FLOATS));
  const int in_tile = (int)((at + threadIdx.x) % TILE_FLOATS), of_sums = in_tile - GATES * VALUES;
  const int row = place.row0 + (of_sums < 0 ? in_tile / VALUES : of_sums), columns = a.columns[place.side];
  const int column = place.column0 + (of_sums < 0 ? in_tile % VALUES : 0);
  if (row >= a.rows || column >= columns) return;
  if (of_sums < 0) a.weights[place.side][(index_t)row * columns + column] = total;
  else if (column == 0 && a.biases[place.side]) a.biases[place.side][row] = total;
}
