#define NAME masked_x_gru
#define PARTS 1
#define SIZE N
#define PART_WIDTHS {N}
#define PART_OFFSETS {0}
#define WRITTEN (5 * N + DEPTH)
#define DECAYING 1
#define ADDED 0
#define TAPE ALIGNED((4 * N))
#define SUMS (N * (3 * N) + DEPTH * (3 * N) + 1 * (4 * N))
#define COPIED 0
#define COPIED_WIDTHS {0}
#define COPIED_FROM {0}
#define COPIED_TO {0}
#define SCRATCH MOST(MOST(1, 1 * ROUND_UP(N)), 1 * ROUND_UP(N))
#define TOTALS 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP taped_step
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
  const V v21 = in[9] + in[8];
  const V v9 = in[1] + in[0];
  const V v10 = in[2] + v9;
  const V v11 = v_sigmoid(v10);
  const V v18 = in[7] + in[6];
  const V v22 = v11 * v18;
  const V v23 = v21 + v22;
  const V v24 = v_tanh(v23);
  const V v14 = in[4] + in[3];
  const V v15 = in[5] + v14;
  const V v16 = v_sigmoid(v15);
  const V v25 = in[10] - v24;
  const V v26 = v16 * v25;
  const V v27 = v24 + v26;
  const V v29 = in[10] - v27;
  const V v30 = in[11] * v29;
  const V v31 = v27 + v30;
  out[0] = v31;
  out[1] = v11;
  out[2] = v16;
  out[3] = v18;
  out[4] = v24;
  if (decay) {
    const V v38 = v_const(1.0) - v16;
    const V v39 = in[11] * v38;
    const V v40 = v16 + v39;
    out[5] = v40;
  }
}
INLINE void forward_1_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 6];
  {
    const long depth = DEPTH, k0 = 0;
    const real *w = a->weights[0] + j * depth * 3 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = a->inputs + g->token[r0 + r] * a->input_stride + 0 + k0;
    multiply(rows, g->alone, 1, 3, 6, depth, from, w, acc + 3);
  }
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * depth * 3 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 3, 6, depth, from, w, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[12], out[6];
      fetch_ahead(a->masks[1], g->token[row], AHEAD * a->batch, a->mask_strides[1], unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, 0 + unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, N + unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, (2 * N) + unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, (3 * N) + unit);
      in[0] = load_units(a->units[0] + unit, lanes);
      in[1] = acc[r * 6 + 3];
      in[2] = acc[r * 6 + 1];
      in[3] = load_units(a->units[1] + unit, lanes);
      in[4] = acc[r * 6 + 4];
      in[5] = acc[r * 6 + 2];
      in[6] = load_units(a->units[3] + unit, lanes);
      in[7] = acc[r * 6 + 0];
      in[8] = load_units(a->units[2] + unit, lanes);
      in[9] = acc[r * 6 + 5];
      in[10] = *(const V *)(g->state[0] + row * padded(a, 0) + 0 + unit);
      in[11] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      forward_1(in, out, decay);
      store_units(g->next[0] + row * padded(a, 0) + 0 + unit, out[0], lanes); if (real_step) store_units(a->states[0] + (g->token[row] + a->batch) * N + 0 + unit, out[0], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + 0 + unit, out[1], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + N + unit, out[2], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + (2 * N) + unit, out[3], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + (3 * N) + unit, out[4], lanes);
      if (decay) {
        store_units(g->decay[0] + row * padded(a, 0) + 0 + unit, *(const V *)(g->decay[0] + row * padded(a, 0) + 0 + unit) * out[5], lanes);
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
INLINE void taped_0(const V *in, V *out, const int decay) {
  const V v13 = in[2] * in[2];
  const V v14 = v_const(1.0) - v13;
  const V v10 = v_const(1.0) - in[3];
  const V v19 = in[6] * in[5];
  const V v20 = in[5] - v19;
  const V v24 = v10 * v20;
  const V v25 = v14 * v24;
  const V v27 = in[4] * v25;
  out[0] = v27;
  const V v16 = v_const(1.0) - in[4];
  const V v17 = in[4] * v16;
  const V v26 = in[7] * v25;
  const V v29 = v17 * v26;
  out[1] = v29;
  const V v15 = in[3] * v10;
  const V v7 = in[1] - in[2];
  const V v21 = v7 * v20;
  const V v28 = v15 * v21;
  out[2] = v28;
  out[3] = v25;
  const V v2 = in[1] * in[0];
  out[4] = v2;
  out[5] = v29;
  out[6] = v28;
  out[7] = v25;
  out[8] = v27;
  const V v22 = in[3] * v20;
  const V v23 = v19 + v22;
  out[9] = v23;
  if (decay) {
    const V v11 = in[6] * v10;
    const V v12 = in[3] + v11;
    out[10] = v12;
  }
}
INLINE void taped_0_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 1];

  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[8], out[11];
      fetch_ahead(a->masks[0], g->token[row], -AHEAD * a->batch, a->mask_strides[0], unit);
      __builtin_prefetch(g->before[0][row] + 0 + unit - AHEAD * a->batch * N);
      fetch_ahead(a->tape, g->token[row], -AHEAD * a->batch, TAPE, (3 * N) + unit);
      fetch_ahead(a->tape, g->token[row], -AHEAD * a->batch, TAPE, N + unit);
      fetch_ahead(a->tape, g->token[row], -AHEAD * a->batch, TAPE, 0 + unit);
      fetch_ahead(a->masks[1], g->token[row], -AHEAD * a->batch, a->mask_strides[1], unit);
      fetch_ahead(a->tape, g->token[row], -AHEAD * a->batch, TAPE, (2 * N) + unit);
      in[0] = load_units(a->masks[0] + g->token[row] * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(g->before[0][row] + 0 + unit, lanes);
      in[2] = load_units(a->tape + g->token[row] * TAPE + (3 * N) + unit, lanes);
      in[3] = load_units(a->tape + g->token[row] * TAPE + N + unit, lanes);
      in[4] = load_units(a->tape + g->token[row] * TAPE + 0 + unit, lanes);
      in[5] = *(const V *)(g->grad[0] + row * padded(a, 0) + 0 + unit) + LOSS(0, 0 + unit);
      in[6] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      in[7] = load_units(a->tape + g->token[row] * TAPE + (2 * N) + unit, lanes);
      taped_0(in, out, decay);
      store_units(g->out[row] + 0 + unit, out[0], lanes);
      store_units(g->out[row] + N + unit, out[1], lanes);
      store_units(g->out[row] + (2 * N) + unit, out[2], lanes);
      store_units(g->out[row] + (3 * N) + unit, out[3], lanes);
      store_units(g->out[row] + (4 * N + DEPTH) + unit, out[4], lanes);
      
      
      
      
      *(V *)(g->slots + row * SLOT_STRIDE + 0 + unit) = out[9];
      if (decay) {
        store_units(g->decay[0] + row * padded(a, 0) + 0 + unit, *(const V *)(g->decay[0] + row * padded(a, 0) + 0 + unit) * out[10], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) taped_0_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 1 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v32 = in[1] * in[0];
  const V v33 = in[2] + v32;
  out[0] = v33;
}
INLINE void taped_1_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 2];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[2] + j * 3 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 3 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
      in[2] = *(const V *)(g->slots + row * SLOT_STRIDE + 0 + unit);
      taped_1(in, out, decay);
      store_units(g->next[0] + row * padded(a, 0) + 0 + unit, out[0], lanes);
      if (decay) {

      }
    }
  }
}
ONCE void taped_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) taped_1_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 2 * WIDE < N; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
INLINE void taped_2(const V *in, V *out, const int decay) {
  out[0] = in[0];
}
INLINE void taped_2_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 2];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[3] + j * 3 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + N + k0;
    multiply_2_2(rows, g->alone, 1, 3 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    for (int s = 0; s < 2; s++) {
      const long unit = (j * 2 + s) * WIDE, lanes = DEPTH - unit;
      if (lanes <= 0) break;
      V in[1], out[1];

      in[0] = acc[r * 2 + 0 + s];
      taped_2(in, out, decay);
      store_units((a->written ? g->out[row] + (4 * N) : a->input_grads + g->token[row] * a->input_stride + 0) + unit, out[0], lanes);
      if (decay) {

      }
    }
  }
}
ONCE void taped_2_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) taped_2_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 2 * WIDE < DEPTH; j++) TILED(ROWS, TILE_CALL)
#undef TILE_CALL
}
static void taped_step(const fused_args *a, group *g, const int decay, const int real_step) {
  taped_0_loop(a, g, decay, real_step);
  taped_1_loop(a, g, decay, real_step);
  if (real_step && (a->input_grads || a->written)) taped_2_loop(a, g, decay, real_step);
}
static void sum_steps(const fused_args *a, const waiting *w, real *sums) {
  sums = outer_sum(w, w->written, (4 * N + DEPTH), N, 0, (3 * N), sums);
  sums = outer_sum(w, w->inputs, 0, DEPTH, N, (3 * N), sums);
  sums = column_sum(w, 0, (4 * N), sums);
}
#include "fused_walk.h"
