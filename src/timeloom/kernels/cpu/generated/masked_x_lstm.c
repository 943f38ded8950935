#define NAME masked_x_lstm
#define PARTS 2
#define SIZE (2 * N)
#define PART_WIDTHS {N, N}
#define PART_OFFSETS {0, N}
#define WRITTEN (5 * N + DEPTH)
#define DECAYING 2
#define ADDED 0
#define TAPE ALIGNED((4 * N))
#define SUMS (N * (4 * N) + DEPTH * (4 * N) + 1 * (4 * N))
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
  const V v3 = in[1] * in[0];
  out[0] = v3;
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
  const V v21 = in[7] + in[6];
  const V v22 = in[8] + v21;
  const V v23 = v_sigmoid(v22);
  const V v16 = in[4] + in[3];
  const V v17 = in[5] + v16;
  const V v18 = v_sigmoid(v17);
  const V v29 = in[12] * v18;
  const V v11 = in[1] + in[0];
  const V v12 = in[2] + v11;
  const V v13 = v_sigmoid(v12);
  const V v26 = in[10] + in[9];
  const V v27 = in[11] + v26;
  const V v28 = v_tanh(v27);
  const V v30 = v13 * v28;
  const V v31 = v29 + v30;
  const V v32 = v_tanh(v31);
  const V v33 = v23 * v32;
  const V v35 = in[13] - v33;
  const V v36 = in[14] * v35;
  const V v37 = v33 + v36;
  out[0] = v37;
  const V v39 = in[12] - v31;
  const V v40 = in[15] * v39;
  const V v41 = v31 + v40;
  out[1] = v41;
  out[2] = v13;
  out[3] = v18;
  out[4] = v28;
  out[5] = v23;
  if (decay) {
    const V v60 = v_const(1.0) - v18;
    const V v73 = in[15] * v60;
    const V v74 = v18 + v73;
    out[6] = v74;
  }
}
INLINE void forward_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = DEPTH, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = a->inputs + g->token[r0 + r] * a->input_stride + 0 + k0;
    if (j == 0) fetch_rows(rows, from, AHEAD * a->batch * a->input_stride, depth);
    multiply(rows, g->alone, 1, 4, 8, depth, from, w, acc + 4);
  }
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 4, 8, depth, from, w, acc + 0);
  }
}
INLINE void forward_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[16], out[7];
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at1 = row * padded(a, 1) + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      __builtin_prefetch(a->masks[2] + token * a->mask_strides[2] + unit + ahead * a->mask_strides[2]);
      if (real_step && a->tape) __builtin_prefetch(tape + 0 + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + N + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      in[0] = load_units(a->units[0] + unit, lanes);
      in[1] = acc[r * 8 + 4];
      in[2] = acc[r * 8 + 0];
      in[3] = load_units(a->units[1] + unit, lanes);
      in[4] = acc[r * 8 + 5];
      in[5] = acc[r * 8 + 1];
      in[6] = load_units(a->units[3] + unit, lanes);
      in[7] = acc[r * 8 + 7];
      in[8] = acc[r * 8 + 3];
      in[9] = load_units(a->units[2] + unit, lanes);
      in[10] = acc[r * 8 + 6];
      in[11] = acc[r * 8 + 2];
      in[12] = *(const V *)(g->state[1] + at1 + 0);
      in[13] = *(const V *)(g->state[0] + at0 + 0);
      in[14] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[15] = load_units(a->masks[2] + token * a->mask_strides[2] + unit, lanes);
      forward_1(in, out, decay);
      store_units(g->next[0] + at0 + 0, out[0], lanes); if (real_step) store_units(a->states[0] + (token + a->batch) * N + 0 + unit, out[0], lanes);
      store_units(g->next[1] + at1 + 0, out[1], lanes); if (real_step) store_units(a->states[1] + (token + a->batch) * N + 0 + unit, out[1], lanes);
      if (real_step && a->tape) store_units(tape + 0, out[2], lanes);
      if (real_step && a->tape) store_units(tape + N, out[3], lanes);
      if (real_step && a->tape) store_units(tape + (2 * N), out[4], lanes);
      if (real_step && a->tape) store_units(tape + (3 * N), out[5], lanes);
      if (decay) {
        store_units(g->decay[1] + at1 + 0, *(const V *)(g->decay[1] + at1 + 0) * out[6], lanes);
      }
    }
  }
}
ONCE void forward_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(8, forward_1)
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES((ROWS / 2), 8, forward_1)
  meet(g);
}
static void forward_step(const fused_args *a, group *g, const int decay, const int real_step) {
  forward_0_loop(a, g, decay, real_step);
  forward_1_loop(a, g, decay, real_step);
}
INLINE void taped_0(const V *in, V *out, const int decay) {
  const V v29 = in[8] * in[7];
  const V v30 = in[7] - v29;
  const V v8 = in[3] * in[2];
  const V v9 = in[5] * in[4];
  const V v10 = v8 + v9;
  const V v11 = v_tanh(v10);
  const V v15 = v11 * v11;
  const V v16 = v_const(1.0) - v15;
  const V v31 = in[10] * in[9];
  const V v32 = in[9] - v31;
  const V v34 = in[6] * v32;
  const V v35 = v16 * v34;
  const V v36 = v30 + v35;
  const V v39 = in[2] * v36;
  const V v41 = v29 + v39;
  out[0] = v41;
  const V v23 = v_const(1.0) - in[5];
  const V v24 = in[5] * v23;
  const V v37 = in[4] * v36;
  const V v45 = v24 * v37;
  out[1] = v45;
  const V v21 = v_const(1.0) - in[2];
  const V v22 = in[2] * v21;
  const V v40 = in[3] * v36;
  const V v44 = v22 * v40;
  out[2] = v44;
  const V v17 = in[4] * in[4];
  const V v18 = v_const(1.0) - v17;
  const V v38 = in[5] * v36;
  const V v42 = v18 * v38;
  out[3] = v42;
  const V v19 = v_const(1.0) - in[6];
  const V v20 = in[6] * v19;
  const V v33 = v11 * v32;
  const V v43 = v20 * v33;
  out[4] = v43;
  const V v3 = in[1] * in[0];
  out[5] = v3;
  out[6] = v45;
  out[7] = v44;
  out[8] = v42;
  out[9] = v43;
  out[10] = v31;
  if (decay) {
    const V v25 = in[8] * v21;
    const V v26 = in[2] + v25;
    out[11] = v26;
  }
}
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[11], out[12];
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      real *const tape = a->tape + token * TAPE + unit;
      const real *const before1 = g->before[1][row] + unit;
      const long at1 = row * padded(a, 1) + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const written = g->out[row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(tape + N + ahead * TAPE);
      __builtin_prefetch(before1 + 0 + ahead * N);
      __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      __builtin_prefetch(a->masks[2] + token * a->mask_strides[2] + unit + ahead * a->mask_strides[2]);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(before0 + 0, lanes);
      in[2] = load_units(tape + N, lanes);
      in[3] = load_units(before1 + 0, lanes);
      in[4] = load_units(tape + (2 * N), lanes);
      in[5] = load_units(tape + 0, lanes);
      in[6] = load_units(tape + (3 * N), lanes);
      in[7] = *(const V *)(g->grad[1] + at1 + 0) + LOSS(1, 0 + unit);
      in[8] = load_units(a->masks[2] + token * a->mask_strides[2] + unit, lanes);
      in[9] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[10] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      taped_0(in, out, decay);
      store_units(g->next[1] + at1 + 0, out[0], lanes);
      store_units(written + 0, out[1], lanes);
      store_units(written + N, out[2], lanes);
      store_units(written + (2 * N), out[3], lanes);
      store_units(written + (3 * N), out[4], lanes);
      store_units(written + (4 * N + DEPTH), out[5], lanes);
      
      
      
      
      *(V *)(slots + 0) = out[10];
      if (decay) {
        store_units(g->decay[1] + at1 + 0, *(const V *)(g->decay[1] + at1 + 0) * out[11], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v48 = in[1] * in[0];
  const V v49 = in[2] + v48;
  out[0] = v49;
}
INLINE void taped_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[2] + j * 4 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 4 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
    const real *w = a->weights[3] + j * 4 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 4 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
  sums = outer_sum(g, w, w->written, (4 * N + DEPTH), N, 0, (4 * N), sums);
  sums = outer_sum(g, w, w->inputs, 0, DEPTH, 0, (4 * N), sums);
  sums = column_sum(g, w, 0, (4 * N), sums);
}
#include "fused_walk.h"
