#define NAME masked_gru
#define PARTS 1
#define SIZE N
#define PART_WIDTHS {N}
#define PART_OFFSETS {0}
#define WRITTEN (4 * N)
#define DECAYING 1
#define ADDED 0
#define TAPE ALIGNED((4 * N))
#define SUMS (0)
#define COPIED 3
#define COPIED_WIDTHS {N, N, N}
#define COPIED_FROM {0, N, (2 * N)}
#define COPIED_TO {0, N, (2 * N)}
#define SCRATCH MOST(MOST(MOST(1, 1 * ROUND_UP(N)), 4 * ROUND_UP(N)), 1 * ROUND_UP(N))
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
  const V v7 = in[1] + in[0];
  const V v8 = v_sigmoid(v7);
  const V v13 = in[5] + in[4];
  const V v15 = v8 * v13;
  const V v16 = in[6] + v15;
  const V v17 = v_tanh(v16);
  const V v10 = in[3] + in[2];
  const V v11 = v_sigmoid(v10);
  const V v18 = in[7] - v17;
  const V v19 = v11 * v18;
  const V v20 = v17 + v19;
  const V v22 = in[7] - v20;
  const V v23 = in[8] * v22;
  const V v24 = v20 + v23;
  out[0] = v24;
  out[1] = v8;
  out[2] = v11;
  out[3] = v13;
  out[4] = v17;
  if (decay) {
    const V v31 = v_const(1.0) - v11;
    const V v32 = in[8] * v31;
    const V v33 = v11 + v32;
    out[5] = v33;
  }
}
INLINE void forward_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 3 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 3, 3, depth, from, w, acc + 0);
  }
}
INLINE void forward_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[9], out[6];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(input + N + ahead * a->input_stride);
      __builtin_prefetch(input + (2 * N) + ahead * a->input_stride);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      if (real_step && a->tape) __builtin_prefetch(tape + 0 + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + N + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 3 + 1];
      in[2] = load_units(input + N, lanes);
      in[3] = acc[r * 3 + 2];
      in[4] = load_units(a->units[0] + unit, lanes);
      in[5] = acc[r * 3 + 0];
      in[6] = load_units(input + (2 * N), lanes);
      in[7] = *(const V *)(g->state[0] + at0 + 0);
      in[8] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
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
  OWN_BLOCKS(j, N, 1) SINGLE(3, forward_1)
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES(ROWS, 3, forward_1)
  meet(g);
}
static void forward_step(const fused_args *a, group *g, const int decay, const int real_step) {
  forward_0_loop(a, g, decay, real_step);
  forward_1_loop(a, g, decay, real_step);
}
INLINE void adjoint_0(const V *in, V *out, const int decay) {
  const V v2 = in[1] * in[0];
  out[0] = v2;
  const V v48 = in[3] * in[2];
  const V v50 = in[2] - v48;
  out[1] = v50;
  out[2] = v48;
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
  const V v7 = in[1] + in[0];
  const V v8 = v_sigmoid(v7);
  const V v42 = v_const(1.0) - v8;
  const V v43 = v8 * v42;
  const V v13 = in[5] + in[4];
  const V v15 = v8 * v13;
  const V v16 = in[6] + v15;
  const V v17 = v_tanh(v16);
  const V v35 = v17 * v17;
  const V v36 = v_const(1.0) - v35;
  const V v10 = in[3] + in[2];
  const V v11 = v_sigmoid(v10);
  const V v31 = v_const(1.0) - v11;
  const V v55 = v31 * in[8];
  const V v56 = v36 * v55;
  const V v57 = v13 * v56;
  const V v60 = v43 * v57;
  out[0] = v60;
  const V v40 = v11 * v31;
  const V v18 = in[7] - v17;
  const V v51 = v18 * in[8];
  const V v59 = v40 * v51;
  out[1] = v59;
  out[2] = v56;
  const V v58 = v8 * v56;
  out[3] = v58;
  out[4] = v58;
  out[5] = v60;
  out[6] = v59;
  const V v52 = v11 * in[8];
  const V v54 = in[9] + v52;
  out[7] = v54;
  if (decay) {
    const V v32 = in[10] * v31;
    const V v33 = v11 + v32;
    out[8] = v33;
  }
}
INLINE void adjoint_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 3 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 3, 3, depth, from, w, acc + 0);
  }
}
INLINE void adjoint_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[11], out[9];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      real *const written = g->out[row] + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(input + N + ahead * a->input_stride);
      __builtin_prefetch(input + (2 * N) + ahead * a->input_stride);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 3 + 1];
      in[2] = load_units(input + N, lanes);
      in[3] = acc[r * 3 + 2];
      in[4] = load_units(a->units[0] + unit, lanes);
      in[5] = acc[r * 3 + 0];
      in[6] = load_units(input + (2 * N), lanes);
      in[7] = load_units(before0 + 0, lanes);
      in[8] = *(const V *)(slots + 1 * ROUND_UP(N));
      in[9] = *(const V *)(slots + 2 * ROUND_UP(N));
      in[10] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      adjoint_1(in, out, decay);
      store_units(written + 0, out[0], lanes);
      store_units(written + N, out[1], lanes);
      store_units(written + (2 * N), out[2], lanes);
      store_units(written + (3 * N), out[3], lanes);
      
      
      
      *(V *)(slots + 3 * ROUND_UP(N)) = out[7];
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[8], lanes);
      }
    }
  }
}
ONCE void adjoint_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(3, adjoint_1)
}
ONCE void adjoint_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) adjoint_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES(ROWS, 3, adjoint_1)
  meet(g);
}
INLINE void adjoint_2(const V *in, V *out, const int decay) {
  const V v62 = in[1] * in[0];
  const V v64 = in[2] + v62;
  out[0] = v64;
}
INLINE void adjoint_2_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * 3 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + (3 * N) + k0;
    multiply_2_2(rows, g->alone, 1, depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 0, 2 * depth, from, w + 1 * depth * 2 * WIDE, acc + 0);
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
      in[2] = *(const V *)(slots + 3 * ROUND_UP(N));
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
  const V v15 = v_const(1.0) - in[3];
  const V v16 = in[3] * v15;
  const V v12 = in[0] * in[0];
  const V v13 = v_const(1.0) - v12;
  const V v9 = v_const(1.0) - in[2];
  const V v18 = in[5] * in[4];
  const V v19 = in[4] - v18;
  const V v23 = v9 * v19;
  const V v24 = v13 * v23;
  const V v25 = in[6] * v24;
  const V v28 = v16 * v25;
  out[0] = v28;
  const V v14 = in[2] * v9;
  const V v6 = in[1] - in[0];
  const V v20 = v6 * v19;
  const V v27 = v14 * v20;
  out[1] = v27;
  out[2] = v24;
  const V v26 = in[3] * v24;
  out[3] = v26;
  out[4] = v26;
  out[5] = v28;
  out[6] = v27;
  const V v21 = in[2] * v19;
  const V v22 = v18 + v21;
  out[7] = v22;
  if (decay) {
    const V v10 = in[5] * v9;
    const V v11 = in[2] + v10;
    out[8] = v11;
  }
}
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[7], out[9];
      real *const tape = a->tape + token * TAPE + unit;
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const written = g->out[row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(tape + N + ahead * TAPE);
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      in[0] = load_units(tape + (3 * N), lanes);
      in[1] = load_units(before0 + 0, lanes);
      in[2] = load_units(tape + N, lanes);
      in[3] = load_units(tape + 0, lanes);
      in[4] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[5] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[6] = load_units(tape + (2 * N), lanes);
      taped_0(in, out, decay);
      store_units(written + 0, out[0], lanes);
      store_units(written + N, out[1], lanes);
      store_units(written + (2 * N), out[2], lanes);
      store_units(written + (3 * N), out[3], lanes);
      
      
      
      *(V *)(slots + 0) = out[7];
      if (decay) {
        store_units(g->decay[0] + at0 + 0, *(const V *)(g->decay[0] + at0 + 0) * out[8], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v30 = in[1] * in[0];
  const V v31 = in[2] + v30;
  out[0] = v31;
}
INLINE void taped_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * 3 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + (3 * N) + k0;
    multiply_2_2(rows, g->alone, 1, depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 0, 2 * depth, from, w + 1 * depth * 2 * WIDE, acc + 0);
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
