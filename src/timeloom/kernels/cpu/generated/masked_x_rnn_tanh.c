#define NAME masked_x_rnn_tanh
#define PARTS 1
#define SIZE N
#define PART_WIDTHS {N}
#define PART_OFFSETS {0}
#define WRITTEN (2 * N + DEPTH)
#define DECAYING 1
#define ADDED 0
#define TAPE ALIGNED(N)
#define SUMS (N * N + DEPTH * N + 1 * N)
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
  const V v7 = in[1] + in[0];
  const V v8 = in[2] + v7;
  const V v9 = v_tanh(v8);
  const V v16 = in[3] - v9;
  const V v17 = in[4] * v16;
  const V v18 = v9 + v17;
  out[0] = v18;
  out[1] = v9;
  if (decay) {
    const V v11 = v9 * v9;
    const V v13 = v_const(1.0) - v11;
    const V v14 = in[5] * v13;
    const V v19 = v_const(1.0) - v14;
    const V v20 = in[4] * v19;
    const V v21 = v14 + v20;
    out[2] = v21;
  }
}
INLINE void forward_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = DEPTH, k0 = 0;
    const real *w = a->weights[0] + j * depth * 1 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = a->inputs + g->token[r0 + r] * a->input_stride + 0 + k0;
    if (j == 0) fetch_rows(rows, from, AHEAD * a->batch * a->input_stride, depth);
    multiply(rows, g->alone, 1, 1, 2, depth, from, w, acc + 1);
  }
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * depth * 1 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 1, 2, depth, from, w, acc + 0);
  }
}
INLINE void forward_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[6], out[3];
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      if (real_step && a->tape) __builtin_prefetch(tape + 0 + ahead * TAPE);
      in[0] = load_units(a->units[0] + unit, lanes);
      in[1] = acc[r * 2 + 1];
      in[2] = acc[r * 2 + 0];
      in[3] = *(const V *)(g->state[0] + at0 + 0);
      in[4] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[5] = load_units(a->units[1] + unit, lanes);
      forward_1(in, out, decay);
      store_units(g->next[0] + at0 + 0, out[0], lanes); if (real_step) store_units(a->states[0] + (token + a->batch) * N + 0 + unit, out[0], lanes);
      if (real_step && a->tape) store_units(tape + 0, out[1], lanes);
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[2], lanes);
      }
    }
  }
}
ONCE void forward_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(2, forward_1)
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES(ROWS, 2, forward_1)
  meet(g);
}
static void forward_step(const fused_args *a, group *g, const int decay, const int real_step) {
  forward_0_loop(a, g, decay, real_step);
  forward_1_loop(a, g, decay, real_step);
}
INLINE void taped_0(const V *in, V *out, const int decay) {
  const V v5 = in[2] * in[2];
  const V v7 = v_const(1.0) - v5;
  const V v14 = in[4] * in[3];
  const V v15 = in[3] - v14;
  const V v16 = v7 * v15;
  out[0] = v16;
  const V v2 = in[1] * in[0];
  out[1] = v2;
  out[2] = v16;
  out[3] = v14;
  if (decay) {
    const V v8 = in[5] * v7;
    const V v10 = v_const(1.0) - v8;
    const V v11 = in[4] * v10;
    const V v12 = v8 + v11;
    out[4] = v12;
  }
}
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[6], out[5];
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      real *const tape = a->tape + token * TAPE + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const written = g->out[row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(before0 + 0, lanes);
      in[2] = load_units(tape + 0, lanes);
      in[3] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[4] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[5] = load_units(a->units[1] + unit, lanes);
      taped_0(in, out, decay);
      store_units(written + 0, out[0], lanes);
      store_units(written + (N + DEPTH), out[1], lanes);
      
      *(V *)(slots + 0) = out[3];
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[4], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v19 = in[1] * in[0];
  const V v20 = in[2] + v19;
  out[0] = v20;
}
INLINE void taped_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[2] + j * 1 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
    const real *w = a->weights[3] + j * 1 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
      store_units(a->written ? written + N : a->input_grads + token * a->input_stride + 0 + unit, out[0], lanes);
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
  sums = outer_sum(g, w, w->written, (N + DEPTH), N, 0, N, sums);
  sums = outer_sum(g, w, w->inputs, 0, DEPTH, 0, N, sums);
  sums = column_sum(g, w, 0, N, sums);
}
#include "fused_walk.h"
