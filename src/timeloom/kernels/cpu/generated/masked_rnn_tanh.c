#define NAME masked_rnn_tanh
#define PARTS 1
#define SIZE N
#define PART_WIDTHS {N}
#define PART_OFFSETS {0}
#define WRITTEN N
#define DECAYING 1
#define ADDED 0
#define TAPE ALIGNED(N)
#define SUMS (0)
#define COPIED 1
#define COPIED_WIDTHS {N}
#define COPIED_FROM {0}
#define COPIED_TO {0}
#define SCRATCH MOST(MOST(1, 1 * ROUND_UP(N)), 3 * ROUND_UP(N))
#define TOTALS 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP adjoint_step
#define LOSS_IN_STEP 1
#include "fused_sums.h"
PRODUCTS(2, 2)
INLINE void forward_0(const V *in, V *out, const int decay) {
  const V v2 = in[1] * in[0];
  out[0] = v2;
}
INLINE void forward_0_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 1];

  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[2], out[1];
      fetch_ahead(a->masks[0], g->token[row], AHEAD * a->batch, a->mask_strides[0], unit);
      in[0] = load_units(a->masks[0] + g->token[row] * a->mask_strides[0] + unit, lanes);
      in[1] = *(const V *)(g->state[0] + row * padded(a, 0) + 0 + unit);
      forward_0(in, out, decay);
      *(V *)(g->slots + row * SLOT_STRIDE + 0 + unit) = out[0];
      if (decay) {

      }
    }
  }
}
ONCE void forward_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) forward_0_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 1 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
INLINE void forward_1(const V *in, V *out, const int decay) {
  const V v5 = in[1] + in[0];
  const V v6 = v_tanh(v5);
  const V v13 = in[2] - v6;
  const V v14 = in[3] * v13;
  const V v15 = v6 + v14;
  out[0] = v15;
  out[1] = v6;
  if (decay) {
    const V v8 = v6 * v6;
    const V v10 = v_const(1.0) - v8;
    const V v11 = in[4] * v10;
    const V v16 = v_const(1.0) - v11;
    const V v17 = in[3] * v16;
    const V v18 = v11 + v17;
    out[2] = v18;
  }
}
INLINE void forward_1_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 1];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 1 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 1, 1, depth, from, w, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[5], out[3];
      fetch_ahead(a->inputs, g->token[row], AHEAD * a->batch, a->input_stride, 0 + unit);
      fetch_ahead(a->masks[1], g->token[row], AHEAD * a->batch, a->mask_strides[1], unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, 0 + unit);
      in[0] = load_units(a->inputs + g->token[row] * a->input_stride + 0 + unit, lanes);
      in[1] = acc[r * 1 + 0];
      in[2] = *(const V *)(g->state[0] + row * padded(a, 0) + 0 + unit);
      in[3] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      in[4] = load_units(a->units[0] + unit, lanes);
      forward_1(in, out, decay);
      store_units(g->next[0] + row * padded(a, 0) + 0 + unit, out[0], lanes); if (real_step) store_units(a->states[0] + (g->token[row] + a->batch) * N + 0 + unit, out[0], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + 0 + unit, out[1], lanes);
      if (decay) {
        store_units(g->decay[0] + row * padded(a, 0) + 0 + unit, *(const V *)(g->decay[0] + row * padded(a, 0) + 0 + unit) * out[2], lanes);
      }
    }
  }
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) forward_1_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 1 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
static void forward_step(const fused_args *a, group *g, const int decay, const int real_step) {
  forward_0_loop(a, g, decay, real_step);
  forward_1_loop(a, g, decay, real_step);
}
INLINE void adjoint_0(const V *in, V *out, const int decay) {
  const V v2 = in[1] * in[0];
  out[0] = v2;
  const V v21 = in[3] * in[2];
  const V v23 = in[2] - v21;
  out[1] = v23;
  out[2] = v21;
}
INLINE void adjoint_0_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 1];

  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[4], out[3];
      fetch_ahead(a->masks[0], g->token[row], -AHEAD * a->batch, a->mask_strides[0], unit);
      __builtin_prefetch(g->before[0][row] + 0 + unit - AHEAD * a->batch * N);
      fetch_ahead(a->masks[1], g->token[row], -AHEAD * a->batch, a->mask_strides[1], unit);
      in[0] = load_units(a->masks[0] + g->token[row] * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(g->before[0][row] + 0 + unit, lanes);
      in[2] = *(const V *)(g->grad[0] + row * padded(a, 0) + 0 + unit) + LOSS(0, 0 + unit);
      in[3] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      adjoint_0(in, out, decay);
      *(V *)(g->slots + row * SLOT_STRIDE + 0 + unit) = out[0];
      *(V *)(g->slots + row * SLOT_STRIDE + 1 * ROUND_UP(N) + unit) = out[1];
      *(V *)(g->slots + row * SLOT_STRIDE + 2 * ROUND_UP(N) + unit) = out[2];
      if (decay) {

      }
    }
  }
}
ONCE void adjoint_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) adjoint_0_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 1 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
INLINE void adjoint_1(const V *in, V *out, const int decay) {
  const V v5 = in[1] + in[0];
  const V v6 = v_tanh(v5);
  const V v8 = v6 * v6;
  const V v10 = v_const(1.0) - v8;
  const V v24 = v10 * in[2];
  out[0] = v24;
  out[1] = v24;
  if (decay) {
    const V v11 = in[3] * v10;
    const V v16 = v_const(1.0) - v11;
    const V v17 = in[4] * v16;
    const V v18 = v11 + v17;
    out[2] = v18;
  }
}
INLINE void adjoint_1_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 2];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 2, 2, depth, from, w, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    for (int s = 0; s < 2; s++) {
      const long unit = (j * 2 + s) * WIDE, lanes = N - unit;
      if (lanes <= 0) break;
      V in[5], out[3];
      fetch_ahead(a->inputs, g->token[row], -AHEAD * a->batch, a->input_stride, 0 + unit);
      fetch_ahead(a->masks[1], g->token[row], -AHEAD * a->batch, a->mask_strides[1], unit);
      in[0] = load_units(a->inputs + g->token[row] * a->input_stride + 0 + unit, lanes);
      in[1] = acc[r * 2 + 0 + s];
      in[2] = *(const V *)(g->slots + row * SLOT_STRIDE + 1 * ROUND_UP(N) + unit);
      in[3] = load_units(a->units[0] + unit, lanes);
      in[4] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      adjoint_1(in, out, decay);
      store_units(g->out[row] + 0 + unit, out[0], lanes);
      
      if (decay) {
        store_units(g->decay[0] + row * padded(a, 0) + 0 + unit, *(const V *)(g->decay[0] + row * padded(a, 0) + 0 + unit) * out[2], lanes);
      }
    }
  }
}
ONCE void adjoint_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) adjoint_1_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 2 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
INLINE void adjoint_2(const V *in, V *out, const int decay) {
  const V v27 = in[1] * in[0];
  const V v29 = in[2] + v27;
  out[0] = v29;
}
INLINE void adjoint_2_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 2];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[2] + j * 1 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    for (int s = 0; s < 2; s++) {
      const long unit = (j * 2 + s) * WIDE, lanes = N - unit;
      if (lanes <= 0) break;
      V in[3], out[1];
      fetch_ahead(a->masks[0], g->token[row], -AHEAD * a->batch, a->mask_strides[0], unit);
      in[0] = acc[r * 2 + 0 + s];
      in[1] = load_units(a->masks[0] + g->token[row] * a->mask_strides[0] + unit, lanes);
      in[2] = *(const V *)(g->slots + row * SLOT_STRIDE + 2 * ROUND_UP(N) + unit);
      adjoint_2(in, out, decay);
      store_units(g->next[0] + row * padded(a, 0) + 0 + unit, out[0], lanes);
      if (decay) {

      }
    }
  }
}
ONCE void adjoint_2_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) adjoint_2_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 2 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
static void adjoint_step(const fused_args *a, group *g, const int decay, const int real_step) {
  adjoint_0_loop(a, g, decay, real_step);
  adjoint_1_loop(a, g, decay, real_step);
  adjoint_2_loop(a, g, decay, real_step);
}
static void sum_steps(const fused_args *a, const waiting *w, real *sums) {
}
#include "fused_walk.h"
