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
#define SCRATCH MOST(MOST(MOST(1, 1 * ROUND_UP(N)), 3 * ROUND_UP(N)), 1 * ROUND_UP(N))
#define TOTALS 1
#define SUMMED 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP (a->tape ? taped_step : adjoint_step)
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
INLINE void forward_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 1 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 1, 1, depth, from, w, acc + 0);
  }
}
INLINE void forward_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[5], out[3];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      if (real_step && a->tape) __builtin_prefetch(tape + 0 + ahead * TAPE);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 1 + 0];
      in[2] = *(const V *)(g->state[0] + at0 + 0);
      in[3] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[4] = load_units(a->units[0] + unit, lanes);
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
  OWN_BLOCKS(j, N, 1) SINGLE(1, forward_1)
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES(ROWS, 1, forward_1)
  meet(g);
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
INLINE void adjoint_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[4], out[3];
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(before0 + 0, lanes);
      in[2] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[3] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      adjoint_0(in, out, decay);
      *(V *)(slots + 0) = out[0];
      *(V *)(slots + 1 * ROUND_UP(N)) = out[1];
      *(V *)(slots + 2 * ROUND_UP(N)) = out[2];
      if (decay) {

      }
    }
  }
}
ONCE void adjoint_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) adjoint_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
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
INLINE void adjoint_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 2, 2, depth, from, w, acc + 0);
  }
}
INLINE void adjoint_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    for (int s = 0; s < 2; s++) {
      const long unit = (j * 2 + s) * WIDE, lanes = N - unit;
      if (lanes <= 0) break;
      V in[5], out[3];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = -AHEAD * a->batch;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      real *const written = g->out[row] + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 2 + 0 + s];
      in[2] = *(const V *)(slots + 1 * ROUND_UP(N));
      in[3] = load_units(a->units[0] + unit, lanes);
      in[4] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      adjoint_1(in, out, decay);
      store_units(written + 0, out[0], lanes);
      
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[2], lanes);
      }
    }
  }
}
ONCE void adjoint_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 2) SINGLE(2, adjoint_1)
}
ONCE void adjoint_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) adjoint_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 2) TILES(ROWS, 2, adjoint_1)
  meet(g);
}
INLINE void adjoint_2(const V *in, V *out, const int decay) {
  const V v27 = in[1] * in[0];
  const V v29 = in[2] + v27;
  out[0] = v29;
}
INLINE void adjoint_2_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[2] + j * 1 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
  }
}
INLINE void adjoint_2_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
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
      in[2] = *(const V *)(slots + 2 * ROUND_UP(N));
      adjoint_2(in, out, decay);
      store_units(g->next[0] + at0 + 0, out[0], lanes);
      if (decay) {

      }
    }
  }
}
ONCE void adjoint_2_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 2) SINGLE(2, adjoint_2)
}
ONCE void adjoint_2_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) adjoint_2_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 2) TILES(ROWS, 2, adjoint_2)
  meet(g);
}
static void adjoint_step(const fused_args *a, group *g, const int decay, const int real_step) {
  adjoint_0_loop(a, g, decay, real_step);
  adjoint_1_loop(a, g, decay, real_step);
  adjoint_2_loop(a, g, decay, real_step);
}
INLINE void taped_0(const V *in, V *out, const int decay) {
  const V v3 = in[0] * in[0];
  const V v5 = v_const(1.0) - v3;
  const V v12 = in[2] * in[1];
  const V v13 = in[1] - v12;
  const V v14 = v5 * v13;
  out[0] = v14;
  out[1] = v14;
  out[2] = v12;
  if (decay) {
    const V v6 = in[3] * v5;
    const V v8 = v_const(1.0) - v6;
    const V v9 = in[2] * v8;
    const V v10 = v6 + v9;
    out[3] = v10;
  }
}
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[4], out[4];
      real *const tape = a->tape + token * TAPE + unit;
      const long ahead = -AHEAD * a->batch;
      const long at0 = row * padded(a, 0) + unit;
      real *const written = g->out[row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(tape + 0, lanes);
      in[1] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[2] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[3] = load_units(a->units[0] + unit, lanes);
      taped_0(in, out, decay);
      store_units(written + 0, out[0], lanes);
      
      *(V *)(slots + 0) = out[2];
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[3], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v16 = in[1] * in[0];
  const V v17 = in[2] + v16;
  out[0] = v17;
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
static void taped_step(const fused_args *a, group *g, const int decay, const int real_step) {
  taped_0_loop(a, g, decay, real_step);
  taped_1_loop(a, g, decay, real_step);
}
static void sum_steps(const fused_args *a, const group *g, const waiting *w) {
  real *sums = g->sums;
}
#include "fused_walk.h"
