// A product of many rows: c (rows, columns) = a (rows, terms) b (terms, columns) + bias, as precise as in float32.
//
// A block computes tiles of ROWS x COLUMNS numbers, one after the other, TERMS terms at a time. Each row of a and each
// column of b is scaled for these terms by itself, split into halves and laid down in shared memory, in one of two
// buffers, while the tensor cores multiply what is in the other; the next terms, of the same tile or of the next one, are
// on their way to registers meanwhile. The readable twin is cells/projection.py.
//
// Compiled for COLUMNS and a layout. BY_TERMS: whether the terms of a column of b are neighbours in memory, else the
// columns are. ALIGNED: whether a and b may be read, and EVEN: whether c may be written, in vectors.
#include "split_halves.cuh"
typedef long long index_t;

#define ROWS 128
#define TERMS 32
#define WARPS 8
#define WARPS_ACROSS 2
#define DOWN 2                                    // products of a warp: 16 rows, and two times 8 columns
#define ACROSS (COLUMNS / WARPS_ACROSS / 16)
#define QUADS (TERMS / 4)
#define READS_OF_A (ROWS * QUADS / (32 * WARPS))
#define READS_OF_B (BY_TERMS ? COLUMNS * QUADS / (32 * WARPS) : TERMS / 8)
#define LOW_OF_A (ROWS * TERMS)                   // where the low halves of a begin in a buffer, and those of b
#define OF_B (2 * ROWS * TERMS)
#define LOW_OF_B (OF_B + COLUMNS * TERMS)
#define HALVES (OF_B + 2 * COLUMNS * TERMS)       // of a buffer
#define COPIES_COLUMNS(warp) (COLUMNS == 16 * WARPS || 16 * (warp) < COLUMNS)   // not BY_TERMS, a warp reads 16 columns

struct RowProductsArgs {
  const float *a, *b;
  const float *bias, *more;                       // (columns) and (also): added to all columns, and to the first ones; or NULL
  float *c;
  int rows, columns, terms, also;
  int a_stride, b_stride, c_stride;               // of rows of a and c, and of columns of b or, not BY_TERMS, its rows
};

__device__ __forceinline__ float4 read_four(const float *at, int count) {
  if (ALIGNED) return count > 0 ? *(const float4 *)at : float4{};
  return {count > 0 ? at[0] : 0.0f, count > 1 ? at[1] : 0.0f, count > 2 ? at[2] : 0.0f, count > 3 ? at[3] : 0.0f};
}
// Where eight halves begin: rows of `length`, whose pieces of eight are numbered anew, so that the same piece of eight rows
// that follow each other lies in different banks.
template <int length> __device__ __forceinline__ int place_of(int row, int column) {
  const int turn = length % 64 ? row >> 1 & 3 : row & 7;
  return row * length + ((column >> 3 ^ turn) << 3);
}
template <int length> __device__ __forceinline__ void put_four(half_bits *to, int low, int row, int column, float4 x) {
  const Pair front = split_pair(x.x, x.y), back = split_pair(x.z, x.w);
  half_bits *const at = to + place_of<length>(row, column) + (column & 4);
  *(Quad *)at = {front.high, back.high};
  *(Quad *)(at + low) = {front.low, back.low};
}
// Rows of TERMS numbers, eight lanes each: scaled by their largest finite number, and laid down.
__device__ __forceinline__ void lay_row(half_bits *to, int low, float *undo, int row, int quad, float4 x) {
  float most = largest_finite(x);
#pragma unroll
  for (int lanes = 1; lanes < QUADS; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  const float scale = scale_of(most);
  put_four<TERMS>(to, low, row, 4 * quad, {scale * x.x, scale * x.y, scale * x.z, scale * x.w});
  if (quad == 0) undo[row] = undo_of(most);
}

// What a thread has read of the next terms.
struct Ahead {
  float4 a[READS_OF_A], b[READS_OF_B];
  __device__ __forceinline__ void fetch(const RowProductsArgs &args, int row0, int column0, int term0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
    const int term = term0 + 4 * quad;
#pragma unroll
    for (int i = 0; i < READS_OF_A; i++) {
      const int row = row0 + own + 32 * WARPS / QUADS * i;
      a[i] = read_four(args.a + row * (index_t)args.a_stride + term, row < args.rows ? args.terms - term : 0);
    }
#pragma unroll
    for (int i = 0; i < READS_OF_B; i++) {
      if (BY_TERMS) {
        const int column = column0 + own + 32 * WARPS / QUADS * i;
        b[i] = read_four(args.b + column * (index_t)args.b_stride + term, column < args.columns ? args.terms - term : 0);
      } else if (COPIES_COLUMNS(warp)) {
        const int column = column0 + 16 * warp + 4 * (lane % 4), row = term0 + lane / 4 + 8 * i;
        b[i] = read_four(args.b + row * (index_t)args.b_stride + column, row < args.terms ? args.columns - column : 0);
      }
    }
  }
  __device__ __forceinline__ void lay_down(half_bits *to, float *undo) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
#pragma unroll
    for (int i = 0; i < READS_OF_A; i++) lay_row(to, LOW_OF_A, undo, own + 32 * WARPS / QUADS * i, quad, a[i]);
    if (BY_TERMS) {
#pragma unroll
      for (int i = 0; i < READS_OF_B; i++)
        lay_row(to + OF_B, LOW_OF_B - OF_B, undo + ROWS, own + 32 * WARPS / QUADS * i, quad, b[i]);
    } else if (COPIES_COLUMNS(warp)) {
      float4 most = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < READS_OF_B; i++) {
        most.x = fmaxf(most.x, finite_size(b[i].x)), most.y = fmaxf(most.y, finite_size(b[i].y));
        most.z = fmaxf(most.z, finite_size(b[i].z)), most.w = fmaxf(most.w, finite_size(b[i].w));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        most.x = fmaxf(most.x, __shfl_xor_sync(0xffffffffu, most.x, lanes));
        most.y = fmaxf(most.y, __shfl_xor_sync(0xffffffffu, most.y, lanes));
        most.z = fmaxf(most.z, __shfl_xor_sync(0xffffffffu, most.z, lanes));
        most.w = fmaxf(most.w, __shfl_xor_sync(0xffffffffu, most.w, lanes));
      }
      const float4 scale = {scale_of(most.x), scale_of(most.y), scale_of(most.z), scale_of(most.w)};
      const int column = 16 * warp + 4 * (lane % 4);
#pragma unroll
      for (int i = 0; i < READS_OF_B; i++) {
        const float4 x = {scale.x * b[i].x, scale.y * b[i].y, scale.z * b[i].z, scale.w * b[i].w};
        put_four<COLUMNS>(to + OF_B, LOW_OF_B - OF_B, lane / 4 + 8 * i, column, x);
      }
      if (lane < 4) *(float4 *)(undo + ROWS + column) = {undo_of(most.x), undo_of(most.y), undo_of(most.z), undo_of(most.w)};
    }
  }
};

// A warp's part of a tile: 16 DOWN rows, 16 ACROSS columns.
struct Part {
  float total[DOWN][2 * ACROSS][4];
  int row0, column0;
  __device__ __forceinline__ Part() {
    const int warp = threadIdx.x / 32;
    row0 = warp / WARPS_ACROSS * (16 * DOWN), column0 = warp % WARPS_ACROSS * (16 * ACROSS);
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < DOWN * 2 * ACROSS * 4; i++) (&total[0][0][0])[i] = 0.0f;
  }
  __device__ __forceinline__ void load_b(unsigned *to, const half_bits *from, int pair, int step) const {
    const int in_eight = threadIdx.x % 8, matrix = threadIdx.x % 32 / 8, column = column0 + 16 * pair + 8 * (matrix >> 1);
    if (BY_TERMS) load_halves(to, from + place_of<TERMS>(column + in_eight, step + 8 * (matrix & 1)));
    else load_halves_turned(to, from + place_of<COLUMNS>(step + in_eight + 8 * (matrix & 1), column));
  }
  // Add the products of a buffer; undo: of the scales of its rows and columns.
  __device__ __forceinline__ void add(const half_bits *from, const float *undo) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    float found[DOWN][2 * ACROSS][4] = {};
#pragma unroll
    for (int step = 0; step < TERMS; step += 16) {
      unsigned high[DOWN][4], low[DOWN][4];
#pragma unroll
      for (int m = 0; m < DOWN; m++) {
        const int at = place_of<TERMS>(row0 + 16 * m + lane % 8 + 8 * (matrix & 1), step + 8 * (matrix >> 1));
        load_halves(high[m], from + at), load_halves(low[m], from + LOW_OF_A + at);
      }
#pragma unroll
      for (int p = 0; p < ACROSS; p++) {
        unsigned b_high[4], b_low[4];
        load_b(b_high, from + OF_B, p, step), load_b(b_low, from + LOW_OF_B, p, step);
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) multiply_halves(found[i / 2][2 * p + i % 2], low[i / 2], b_high + 2 * (i % 2));
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) multiply_halves(found[i / 2][2 * p + i % 2], high[i / 2], b_low + 2 * (i % 2));
#pragma unroll
        for (int i = 0; i < 2 * DOWN; i++) multiply_halves(found[i / 2][2 * p + i % 2], high[i / 2], b_high + 2 * (i % 2));
      }
    }
#pragma unroll
    for (int m = 0; m < DOWN; m++) {
      const float *const of_rows = undo + row0 + 16 * m + lane / 4;
      const float first = of_rows[0], then = of_rows[8];
#pragma unroll
      for (int j = 0; j < 2 * ACROSS; j++) {
        const float2 of_columns = *(const float2 *)(undo + ROWS + column0 + 8 * j + 2 * (lane % 4));
        float *const sum = total[m][j], *const now = found[m][j];
        sum[0] = fmaf(now[0] * of_columns.x, first, sum[0]), sum[1] = fmaf(now[1] * of_columns.y, first, sum[1]);
        sum[2] = fmaf(now[2] * of_columns.x, then, sum[2]), sum[3] = fmaf(now[3] * of_columns.y, then, sum[3]);
      }
    }
  }
  __device__ __forceinline__ void write(const RowProductsArgs &args, int tile_row, int tile_column) const {
    const int lane = threadIdx.x % 32;
    auto bias_of = [&](int column) {
      if (column >= args.columns || !args.bias) return 0.0f;
      return args.bias[column] + (column < args.also ? args.more[column] : 0.0f);
    };
#pragma unroll
    for (int j = 0; j < 2 * ACROSS; j++) {
      const int column = tile_column + column0 + 8 * j + 2 * (lane % 4);
      const float bias[2] = {bias_of(column), bias_of(column + 1)};
#pragma unroll
      for (int i = 0; i < 2 * DOWN; i++) {
        const int row = tile_row + row0 + 8 * i + lane / 4;
        if (row >= args.rows) continue;
        const float *const sum = total[i / 2][j] + 2 * (i % 2);
        float *const to = args.c + row * (index_t)args.c_stride + column;
        if (EVEN && column < args.columns) *(float2 *)to = {sum[0] + bias[0], sum[1] + bias[1]};
        if (!EVEN && column < args.columns) to[0] = sum[0] + bias[0];
        if (!EVEN && column + 1 < args.columns) to[1] = sum[1] + bias[1];
      }
    }
  }
};

// The pieces of work of a block, one after the other: TERMS terms of one of its tiles.
struct Piece {
  int tile, term0;
  __device__ __forceinline__ void next(const RowProductsArgs &args) {
    term0 += TERMS;
    if (term0 >= args.terms) term0 = 0, tile += gridDim.x;
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, COLUMNS <= 64 ? 2 : 1)
multiply_rows(const __grid_constant__ RowProductsArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  half_bits *const halves = (half_bits *)shared;                  // [2][HALVES]
  float *const undo = (float *)(halves + 2 * HALVES);             // [2][ROWS + COLUMNS]: the inverse of the scales
  const int across = (args.columns + COLUMNS - 1) / COLUMNS, tiles = (args.rows + ROWS - 1) / ROWS * across;
  Ahead ahead;
  auto fetch = [&](const Piece &piece) {
    if (piece.tile < tiles) ahead.fetch(args, piece.tile / across * ROWS, piece.tile % across * COLUMNS, piece.term0);
  };
  Piece now = {(int)blockIdx.x, 0}, later = now;
  fetch(later);
  ahead.lay_down(halves, undo);
  later.next(args);
  fetch(later);
  __syncthreads();
  Part part;
#pragma unroll 1
  for (int buffer = 0; now.tile < tiles; buffer ^= 1) {
    if (later.tile < tiles) ahead.lay_down(halves + (buffer ^ 1) * HALVES, undo + (buffer ^ 1) * (ROWS + COLUMNS));
    later.next(args);
    fetch(later);
    part.add(halves + buffer * HALVES, undo + buffer * (ROWS + COLUMNS));
    if (now.term0 + TERMS >= args.terms) {
      part.write(args, now.tile / across * ROWS, now.tile % across * COLUMNS);
      part.clear();
    }
    now.next(args);
    __syncthreads();
  }
}
