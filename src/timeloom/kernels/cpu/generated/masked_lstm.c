#define NAME masked_lstm
#define PARTS 2
#define SIZE (2 * N)
#define PART_WIDTHS {N, N}
#define PART_OFFSETS {0, N}
#define WRITTEN (4 * N)
#define DECAYING 2
#define ADDED 0
#define TAPE ALIGNED((4 * N))
#define SUMS (0)
#define COPIED 4
#define COPIED_WIDTHS {N, N, N, N}
#define COPIED_FROM {0, N, (2 * N), (3 * N)}
#define COPIED_TO {0, N, (2 * N), (3 * N)}
#define SCRATCH MOST(MOST(1, 1 * ROUND_UP(N)), 5 * ROUND_UP(N))
#define TOTALS 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP adjoint_step
#define LOSS_IN_STEP 1
#include "fused_sums.h"
PRODUCTS(2, 2)
INLINE void forward_0(const V *in, V *out, const int decay) {
  const V v3 = in[1] * in[0];
  out[0] = v3;
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
  const V v15 = in[5] + in[4];
  const V v16 = v_sigmoid(v15);
  const V v12 = in[3] + in[2];
  const V v13 = v_sigmoid(v12);
  const V v20 = in[8] * v13;
  const V v9 = in[1] + in[0];
  const V v10 = v_sigmoid(v9);
  const V v18 = in[7] + in[6];
  const V v19 = v_tanh(v18);
  const V v21 = v10 * v19;
  const V v22 = v20 + v21;
  const V v23 = v_tanh(v22);
  const V v24 = v16 * v23;
  const V v26 = in[9] - v24;
  const V v27 = in[10] * v26;
  const V v28 = v24 + v27;
  out[0] = v28;
  const V v30 = in[8] - v22;
  const V v31 = in[11] * v30;
  const V v32 = v22 + v31;
  out[1] = v32;
  out[2] = v10;
  out[3] = v13;
  out[4] = v19;
  out[5] = v16;
  if (decay) {
    const V v51 = v_const(1.0) - v13;
    const V v64 = in[11] * v51;
    const V v65 = v13 + v64;
    out[6] = v65;
  }
}
INLINE void forward_1_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 4];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 4, 4, depth, from, w, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[12], out[7];
      fetch_ahead(a->inputs, g->token[row], AHEAD * a->batch, a->input_stride, 0 + unit);
      fetch_ahead(a->inputs, g->token[row], AHEAD * a->batch, a->input_stride, N + unit);
      fetch_ahead(a->inputs, g->token[row], AHEAD * a->batch, a->input_stride, (3 * N) + unit);
      fetch_ahead(a->inputs, g->token[row], AHEAD * a->batch, a->input_stride, (2 * N) + unit);
      fetch_ahead(a->masks[1], g->token[row], AHEAD * a->batch, a->mask_strides[1], unit);
      fetch_ahead(a->masks[2], g->token[row], AHEAD * a->batch, a->mask_strides[2], unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, 0 + unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, N + unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, (2 * N) + unit);
      if (real_step && a->tape) fetch_ahead(a->tape, g->token[row], AHEAD * a->batch, TAPE, (3 * N) + unit);
      in[0] = load_units(a->inputs + g->token[row] * a->input_stride + 0 + unit, lanes);
      in[1] = acc[r * 4 + 0];
      in[2] = load_units(a->inputs + g->token[row] * a->input_stride + N + unit, lanes);
      in[3] = acc[r * 4 + 1];
      in[4] = load_units(a->inputs + g->token[row] * a->input_stride + (3 * N) + unit, lanes);
      in[5] = acc[r * 4 + 3];
      in[6] = load_units(a->inputs + g->token[row] * a->input_stride + (2 * N) + unit, lanes);
      in[7] = acc[r * 4 + 2];
      in[8] = *(const V *)(g->state[1] + row * padded(a, 1) + 0 + unit);
      in[9] = *(const V *)(g->state[0] + row * padded(a, 0) + 0 + unit);
      in[10] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      in[11] = load_units(a->masks[2] + g->token[row] * a->mask_strides[2] + unit, lanes);
      forward_1(in, out, decay);
      store_units(g->next[0] + row * padded(a, 0) + 0 + unit, out[0], lanes); if (real_step) store_units(a->states[0] + (g->token[row] + a->batch) * N + 0 + unit, out[0], lanes);
      store_units(g->next[1] + row * padded(a, 1) + 0 + unit, out[1], lanes); if (real_step) store_units(a->states[1] + (g->token[row] + a->batch) * N + 0 + unit, out[1], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + 0 + unit, out[2], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + N + unit, out[3], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + (2 * N) + unit, out[4], lanes);
      if (real_step && a->tape) store_units(a->tape + g->token[row] * TAPE + (3 * N) + unit, out[5], lanes);
      if (decay) {
        store_units(g->decay[1] + row * padded(a, 1) + 0 + unit, *(const V *)(g->decay[1] + row * padded(a, 1) + 0 + unit) * out[6], lanes);
      }
    }
  }
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) forward_1_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 1 * WIDE < N; j++) TILED((ROWS / 2), TILE_CALL)
#undef TILE_CALL
}
static void forward_step(const fused_args *a, group *g, const int decay, const int real_step) {
  forward_0_loop(a, g, decay, real_step);
  forward_1_loop(a, g, decay, real_step);
}
INLINE void adjoint_0(const V *in, V *out, const int decay) {
  const V v3 = in[1] * in[0];
  out[0] = v3;
  const V v76 = in[5] * in[4];
  const V v78 = in[4] - v76;
  out[1] = v78;
  const V v72 = in[3] * in[2];
  const V v74 = in[2] - v72;
  out[2] = v74;
  out[3] = v72;
  out[4] = v76;
}
INLINE void adjoint_0_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 1];

  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[6], out[5];
      fetch_ahead(a->masks[0], g->token[row], -AHEAD * a->batch, a->mask_strides[0], unit);
      __builtin_prefetch(g->before[0][row] + 0 + unit - AHEAD * a->batch * N);
      fetch_ahead(a->masks[2], g->token[row], -AHEAD * a->batch, a->mask_strides[2], unit);
      fetch_ahead(a->masks[1], g->token[row], -AHEAD * a->batch, a->mask_strides[1], unit);
      in[0] = load_units(a->masks[0] + g->token[row] * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(g->before[0][row] + 0 + unit, lanes);
      in[2] = *(const V *)(g->grad[1] + row * padded(a, 1) + 0 + unit) + LOSS(1, 0 + unit);
      in[3] = load_units(a->masks[2] + g->token[row] * a->mask_strides[2] + unit, lanes);
      in[4] = *(const V *)(g->grad[0] + row * padded(a, 0) + 0 + unit) + LOSS(0, 0 + unit);
      in[5] = load_units(a->masks[1] + g->token[row] * a->mask_strides[1] + unit, lanes);
      adjoint_0(in, out, decay);
      *(V *)(g->slots + row * SLOT_STRIDE + 0 + unit) = out[0];
      *(V *)(g->slots + row * SLOT_STRIDE + 1 * ROUND_UP(N) + unit) = out[1];
      *(V *)(g->slots + row * SLOT_STRIDE + 2 * ROUND_UP(N) + unit) = out[2];
      *(V *)(g->slots + row * SLOT_STRIDE + 3 * ROUND_UP(N) + unit) = out[3];
      *(V *)(g->slots + row * SLOT_STRIDE + 4 * ROUND_UP(N) + unit) = out[4];
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
  const V v12 = in[3] + in[2];
  const V v13 = v_sigmoid(v12);
  const V v20 = in[8] * v13;
  const V v9 = in[1] + in[0];
  const V v10 = v_sigmoid(v9);
  const V v18 = in[7] + in[6];
  const V v19 = v_tanh(v18);
  const V v21 = v10 * v19;
  const V v22 = v20 + v21;
  const V v23 = v_tanh(v22);
  const V v38 = v23 * v23;
  const V v39 = v_const(1.0) - v38;
  const V v15 = in[5] + in[4];
  const V v16 = v_sigmoid(v15);
  const V v80 = v16 * in[9];
  const V v81 = v39 * v80;
  const V v82 = in[10] + v81;
  const V v85 = v13 * v82;
  const V v87 = in[11] + v85;
  out[0] = v87;
  const V v54 = v_const(1.0) - v10;
  const V v55 = v10 * v54;
  const V v83 = v19 * v82;
  const V v91 = v55 * v83;
  out[1] = v91;
  const V v51 = v_const(1.0) - v13;
  const V v52 = v13 * v51;
  const V v86 = in[8] * v82;
  const V v90 = v52 * v86;
  out[2] = v90;
  const V v45 = v19 * v19;
  const V v46 = v_const(1.0) - v45;
  const V v84 = v10 * v82;
  const V v88 = v46 * v84;
  out[3] = v88;
  const V v48 = v_const(1.0) - v16;
  const V v49 = v16 * v48;
  const V v79 = v23 * in[9];
  const V v89 = v49 * v79;
  out[4] = v89;
  out[5] = v91;
  out[6] = v90;
  out[7] = v88;
  out[8] = v89;
  if (decay) {
    const V v64 = in[12] * v51;
    const V v65 = v13 + v64;
    out[9] = v65;
  }
}
INLINE void adjoint_1_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 4];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 4, 4, depth, from, w, acc + 0);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r;
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[13], out[10];
      fetch_ahead(a->inputs, g->token[row], -AHEAD * a->batch, a->input_stride, 0 + unit);
      fetch_ahead(a->inputs, g->token[row], -AHEAD * a->batch, a->input_stride, N + unit);
      fetch_ahead(a->inputs, g->token[row], -AHEAD * a->batch, a->input_stride, (3 * N) + unit);
      fetch_ahead(a->inputs, g->token[row], -AHEAD * a->batch, a->input_stride, (2 * N) + unit);
      __builtin_prefetch(g->before[1][row] + 0 + unit - AHEAD * a->batch * N);
      fetch_ahead(a->masks[2], g->token[row], -AHEAD * a->batch, a->mask_strides[2], unit);
      in[0] = load_units(a->inputs + g->token[row] * a->input_stride + 0 + unit, lanes);
      in[1] = acc[r * 4 + 0];
      in[2] = load_units(a->inputs + g->token[row] * a->input_stride + N + unit, lanes);
      in[3] = acc[r * 4 + 1];
      in[4] = load_units(a->inputs + g->token[row] * a->input_stride + (3 * N) + unit, lanes);
      in[5] = acc[r * 4 + 3];
      in[6] = load_units(a->inputs + g->token[row] * a->input_stride + (2 * N) + unit, lanes);
      in[7] = acc[r * 4 + 2];
      in[8] = load_units(g->before[1][row] + 0 + unit, lanes);
      in[9] = *(const V *)(g->slots + row * SLOT_STRIDE + 1 * ROUND_UP(N) + unit);
      in[10] = *(const V *)(g->slots + row * SLOT_STRIDE + 2 * ROUND_UP(N) + unit);
      in[11] = *(const V *)(g->slots + row * SLOT_STRIDE + 3 * ROUND_UP(N) + unit);
      in[12] = load_units(a->masks[2] + g->token[row] * a->mask_strides[2] + unit, lanes);
      adjoint_1(in, out, decay);
      store_units(g->next[1] + row * padded(a, 1) + 0 + unit, out[0], lanes);
      store_units(g->out[row] + 0 + unit, out[1], lanes);
      store_units(g->out[row] + N + unit, out[2], lanes);
      store_units(g->out[row] + (2 * N) + unit, out[3], lanes);
      store_units(g->out[row] + (3 * N) + unit, out[4], lanes);
      
      
      
      
      if (decay) {
        store_units(g->decay[1] + row * padded(a, 1) + 0 + unit, *(const V *)(g->decay[1] + row * padded(a, 1) + 0 + unit) * out[9], lanes);
      }
    }
  }
}
ONCE void adjoint_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
#define TILE_CALL(rows) adjoint_1_tile(rows, a, g, decay, real_step, r, j);
  for (long j = 0; j * 1 * WIDE < N; j++) TILED((ROWS / 2), TILE_CALL)
#undef TILE_CALL
}
INLINE void adjoint_2(const V *in, V *out, const int decay) {
  const V v93 = in[1] * in[0];
  const V v95 = in[2] + v93;
  out[0] = v95;
}
INLINE void adjoint_2_tile(const int rows, const fused_args *a, group *g, const int decay,
    const int real_step, const long r0, const long j) {
  V acc[ROWS * 2];
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * 4 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 4 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
      in[2] = *(const V *)(g->slots + row * SLOT_STRIDE + 4 * ROUND_UP(N) + unit);
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
