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
#define SUMMED 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP taped_step
#define LOSS_IN_STEP 1
#include "fused_sums.h"
PRODUCTS(2, 2)
INLINE void forward_0(const V *in, V *out, const int decay) {
  const V v2 = in[1] * in[0];
  out[0] = v2;
}
INLINE void forward_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[2], out[1];
      const long ahead = AHEAD * a->batch;
      const long at0 = row * padded(a, 0) + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      in[0] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[1] = *(const V *)(g->state[0] + at0 + 0);
      forward_0(in, out, decay);
      *(V *)(slots + 0) = out[0];
      if (decay) {

      }
    }
  }
}
ONCE void forward_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) forward_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
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
INLINE void forward_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = DEPTH, k0 = 0;
    const real *w = a->weights[0] + j * depth * 3 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = a->inputs + g->token[r0 + r] * a->input_stride + 0 + k0;
    if (j == 0) fetch_rows(rows, from, AHEAD * a->batch * a->input_stride, depth);
    multiply(rows, g->alone, 1, 3, 6, depth, from, w, acc + 3);
  }
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * depth * 3 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 3, 6, depth, from, w, acc + 0);
  }
}
INLINE void forward_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[12], out[6];
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      if (real_step && a->tape) __builtin_prefetch(tape + 0 + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + N + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
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
      in[10] = *(const V *)(g->state[0] + at0 + 0);
      in[11] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      forward_1(in, out, decay);
      store_units(g->next[0] + at0 + 0, out[0], lanes); if (real_step) store_units(a->states[0] + (token + a->batch) * N + 0 + unit, out[0], lanes);
      if (real_step && a->tape) store_units(tape + 0, out[1], lanes);
      if (real_step && a->tape) store_units(tape + N, out[2], lanes);
      if (real_step && a->tape) store_units(tape + (2 * N), out[3], lanes);
      if (real_step && a->tape) store_units(tape + (3 * N), out[4], lanes);
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[5], lanes);
      }
    }
  }
}
ONCE void forward_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(6, forward_1)
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES(ROWS, 6, forward_1)
  meet(g);
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
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[8], out[11];
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      real *const tape = a->tape + token * TAPE + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const written = g->out[row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      __builtin_prefetch(tape + N + ahead * TAPE);
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      in[0] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(before0 + 0, lanes);
      in[2] = load_units(tape + (3 * N), lanes);
      in[3] = load_units(tape + N, lanes);
      in[4] = load_units(tape + 0, lanes);
      in[5] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[6] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[7] = load_units(tape + (2 * N), lanes);
      taped_0(in, out, decay);
      store_units(written + 0, out[0], lanes);
      store_units(written + N, out[1], lanes);
      store_units(written + (2 * N), out[2], lanes);
      store_units(written + (3 * N), out[3], lanes);
      store_units(written + (4 * N + DEPTH), out[4], lanes);
      
      
      
      
      *(V *)(slots + 0) = out[9];
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[10], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v32 = in[1] * in[0];
  const V v33 = in[2] + v32;
  out[0] = v33;
}
INLINE void taped_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[2] + j * 3 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 3 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
  }
}
INLINE void taped_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    for (int s = 0; s < 2; s++) {
      const long unit = (j * 2 + s) * WIDE, lanes = N - unit;
      if (lanes <= 0) break;
      V in[3], out[1];
      const long ahead = -AHEAD * a->batch;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      in[0] = acc[r * 2 + 0 + s];
      in[1] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[2] = *(const V *)(slots + 0);
      taped_1(in, out, decay);
      store_units(g->next[0] + at0 + 0, out[0], lanes);
      if (decay) {

      }
    }
  }
}
ONCE void taped_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 2) SINGLE(2, taped_1)
}
ONCE void taped_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) taped_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 2) TILES(ROWS, 2, taped_1)
  meet(g);
}
INLINE void taped_2(const V *in, V *out, const int decay) {
  out[0] = in[0];
}
INLINE void taped_2_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[3] + j * 3 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + N + k0;
    multiply_2_2(rows, g->alone, 1, 3 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
  }
}
INLINE void taped_2_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    for (int s = 0; s < 2; s++) {
      const long unit = (j * 2 + s) * WIDE, lanes = DEPTH - unit;
      if (lanes <= 0) break;
      V in[1], out[1];
      real *const written = g->out[row] + unit;

      in[0] = acc[r * 2 + 0 + s];
      taped_2(in, out, decay);
      store_units(a->written ? written + (4 * N) : a->input_grads + token * a->input_stride + 0 + unit, out[0], lanes);
      if (decay) {

      }
    }
  }
}
ONCE void taped_2_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, DEPTH, 2) SINGLE(2, taped_2)
}
ONCE void taped_2_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) taped_2_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, DEPTH, 2) TILES(ROWS, 2, taped_2)
  meet(g);
}
static void taped_step(const fused_args *a, group *g, const int decay, const int real_step) {
  taped_0_loop(a, g, decay, real_step);
  taped_1_loop(a, g, decay, real_step);
  if (real_step && (a->input_grads || a->written)) taped_2_loop(a, g, decay, real_step);
}
static void sum_steps(const fused_args *a, const group *g, const waiting *w) {
  real *sums = g->sums;
  sums = outer_sum(g, w, w->written, (4 * N + DEPTH), N, 0, (3 * N), sums);
  sums = outer_sum(g, w, w->inputs, 0, DEPTH, N, (3 * N), sums);
  sums = column_sum(g, w, 0, (4 * N), sums);
}
#include "fused_walk.h"
