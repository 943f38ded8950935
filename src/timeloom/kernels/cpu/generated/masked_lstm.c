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
#define SCRATCH MOST(MOST(MOST(1, 1 * ROUND_UP(N)), 5 * ROUND_UP(N)), 1 * ROUND_UP(N))
#define TOTALS 1
#define SUMMED 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP (a->tape ? taped_step : adjoint_step)
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
INLINE void forward_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 4, 4, depth, from, w, acc + 0);
  }
}
INLINE void forward_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[12], out[7];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at1 = row * padded(a, 1) + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(input + N + ahead * a->input_stride);
      __builtin_prefetch(input + (3 * N) + ahead * a->input_stride);
      __builtin_prefetch(input + (2 * N) + ahead * a->input_stride);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      __builtin_prefetch(a->masks[2] + token * a->mask_strides[2] + unit + ahead * a->mask_strides[2]);
      if (real_step && a->tape) __builtin_prefetch(tape + 0 + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + N + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      if (real_step && a->tape) __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 4 + 0];
      in[2] = load_units(input + N, lanes);
      in[3] = acc[r * 4 + 1];
      in[4] = load_units(input + (3 * N), lanes);
      in[5] = acc[r * 4 + 3];
      in[6] = load_units(input + (2 * N), lanes);
      in[7] = acc[r * 4 + 2];
      in[8] = *(const V *)(g->state[1] + at1 + 0);
      in[9] = *(const V *)(g->state[0] + at0 + 0);
      in[10] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      in[11] = load_units(a->masks[2] + token * a->mask_strides[2] + unit, lanes);
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
  OWN_BLOCKS(j, N, 1) SINGLE(4, forward_1)
}
ONCE void forward_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES((ROWS / 2), 4, forward_1)
  meet(g);
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
INLINE void adjoint_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[6], out[5];
      const long ahead = -AHEAD * a->batch;
      const real *const before0 = g->before[0][row] + unit;
      const long at1 = row * padded(a, 1) + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(a->masks[0] + token * a->mask_strides[0] + unit + ahead * a->mask_strides[0]);
      __builtin_prefetch(before0 + 0 + ahead * N);
      __builtin_prefetch(a->masks[2] + token * a->mask_strides[2] + unit + ahead * a->mask_strides[2]);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(a->masks[0] + token * a->mask_strides[0] + unit, lanes);
      in[1] = load_units(before0 + 0, lanes);
      in[2] = *(const V *)(g->grad[1] + at1 + 0) + LOSS(1, 0 + unit);
      in[3] = load_units(a->masks[2] + token * a->mask_strides[2] + unit, lanes);
      in[4] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[5] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      adjoint_0(in, out, decay);
      *(V *)(slots + 0) = out[0];
      *(V *)(slots + 1 * ROUND_UP(N)) = out[1];
      *(V *)(slots + 2 * ROUND_UP(N)) = out[2];
      *(V *)(slots + 3 * ROUND_UP(N)) = out[3];
      *(V *)(slots + 4 * ROUND_UP(N)) = out[4];
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
INLINE void adjoint_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->slots + (r0 + r) * SLOT_STRIDE + 0 + k0;
    multiply(rows, g->alone, 1, 4, 4, depth, from, w, acc + 0);
  }
}
INLINE void adjoint_1_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[13], out[10];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = -AHEAD * a->batch;
      const real *const before1 = g->before[1][row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      const long at1 = row * padded(a, 1) + unit;
      real *const written = g->out[row] + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(input + N + ahead * a->input_stride);
      __builtin_prefetch(input + (3 * N) + ahead * a->input_stride);
      __builtin_prefetch(input + (2 * N) + ahead * a->input_stride);
      __builtin_prefetch(before1 + 0 + ahead * N);
      __builtin_prefetch(a->masks[2] + token * a->mask_strides[2] + unit + ahead * a->mask_strides[2]);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 4 + 0];
      in[2] = load_units(input + N, lanes);
      in[3] = acc[r * 4 + 1];
      in[4] = load_units(input + (3 * N), lanes);
      in[5] = acc[r * 4 + 3];
      in[6] = load_units(input + (2 * N), lanes);
      in[7] = acc[r * 4 + 2];
      in[8] = load_units(before1 + 0, lanes);
      in[9] = *(const V *)(slots + 1 * ROUND_UP(N));
      in[10] = *(const V *)(slots + 2 * ROUND_UP(N));
      in[11] = *(const V *)(slots + 3 * ROUND_UP(N));
      in[12] = load_units(a->masks[2] + token * a->mask_strides[2] + unit, lanes);
      adjoint_1(in, out, decay);
      store_units(g->next[1] + at1 + 0, out[0], lanes);
      store_units(written + 0, out[1], lanes);
      store_units(written + N, out[2], lanes);
      store_units(written + (2 * N), out[3], lanes);
      store_units(written + (3 * N), out[4], lanes);
      
      
      
      
      if (decay) {
        store_units(g->decay[1] + at1 + 0, *(const V *)(g->decay[1] + at1 + 0) * out[9], lanes);
      }
    }
  }
}
ONCE void adjoint_1_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(4, adjoint_1)
}
ONCE void adjoint_1_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) adjoint_1_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES((ROWS / 2), 4, adjoint_1)
  meet(g);
}
INLINE void adjoint_2(const V *in, V *out, const int decay) {
  const V v93 = in[1] * in[0];
  const V v95 = in[2] + v93;
  out[0] = v95;
}
INLINE void adjoint_2_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * 4 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 4 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
      in[2] = *(const V *)(slots + 4 * ROUND_UP(N));
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
  const V v27 = in[6] * in[5];
  const V v28 = in[5] - v27;
  const V v6 = in[1] * in[0];
  const V v7 = in[3] * in[2];
  const V v8 = v6 + v7;
  const V v9 = v_tanh(v8);
  const V v13 = v9 * v9;
  const V v14 = v_const(1.0) - v13;
  const V v29 = in[8] * in[7];
  const V v30 = in[7] - v29;
  const V v32 = in[4] * v30;
  const V v33 = v14 * v32;
  const V v34 = v28 + v33;
  const V v37 = in[0] * v34;
  const V v39 = v27 + v37;
  out[0] = v39;
  const V v21 = v_const(1.0) - in[3];
  const V v22 = in[3] * v21;
  const V v35 = in[2] * v34;
  const V v43 = v22 * v35;
  out[1] = v43;
  const V v19 = v_const(1.0) - in[0];
  const V v20 = in[0] * v19;
  const V v38 = in[1] * v34;
  const V v42 = v20 * v38;
  out[2] = v42;
  const V v15 = in[2] * in[2];
  const V v16 = v_const(1.0) - v15;
  const V v36 = in[3] * v34;
  const V v40 = v16 * v36;
  out[3] = v40;
  const V v17 = v_const(1.0) - in[4];
  const V v18 = in[4] * v17;
  const V v31 = v9 * v30;
  const V v41 = v18 * v31;
  out[4] = v41;
  out[5] = v43;
  out[6] = v42;
  out[7] = v40;
  out[8] = v41;
  out[9] = v29;
  if (decay) {
    const V v23 = in[6] * v19;
    const V v24 = in[0] + v23;
    out[10] = v24;
  }
}
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[9], out[11];
      real *const tape = a->tape + token * TAPE + unit;
      const long ahead = -AHEAD * a->batch;
      const real *const before1 = g->before[1][row] + unit;
      const long at1 = row * padded(a, 1) + unit;
      const long at0 = row * padded(a, 0) + unit;
      real *const written = g->out[row] + unit;
      real *const slots = g->slots + row * SLOT_STRIDE + unit;
      __builtin_prefetch(tape + N + ahead * TAPE);
      __builtin_prefetch(before1 + 0 + ahead * N);
      __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      __builtin_prefetch(a->masks[2] + token * a->mask_strides[2] + unit + ahead * a->mask_strides[2]);
      __builtin_prefetch(a->masks[1] + token * a->mask_strides[1] + unit + ahead * a->mask_strides[1]);
      in[0] = load_units(tape + N, lanes);
      in[1] = load_units(before1 + 0, lanes);
      in[2] = load_units(tape + (2 * N), lanes);
      in[3] = load_units(tape + 0, lanes);
      in[4] = load_units(tape + (3 * N), lanes);
      in[5] = *(const V *)(g->grad[1] + at1 + 0) + LOSS(1, 0 + unit);
      in[6] = load_units(a->masks[2] + token * a->mask_strides[2] + unit, lanes);
      in[7] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[8] = load_units(a->masks[1] + token * a->mask_strides[1] + unit, lanes);
      taped_0(in, out, decay);
      store_units(g->next[1] + at1 + 0, out[0], lanes);
      store_units(written + 0, out[1], lanes);
      store_units(written + N, out[2], lanes);
      store_units(written + (2 * N), out[3], lanes);
      store_units(written + (3 * N), out[4], lanes);
      
      
      
      
      *(V *)(slots + 0) = out[9];
      if (decay) {
        store_units(g->decay[1] + at1 + 0, *(const V *)(g->decay[1] + at1 + 0) * out[10], lanes);
      }
    }
  }
}
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  const V v45 = in[1] * in[0];
  const V v46 = in[2] + v45;
  out[0] = v46;
}
INLINE void taped_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * 4 * depth * 2 * WIDE, *from[ROWS];
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
static void taped_step(const fused_args *a, group *g, const int decay, const int real_step) {
  taped_0_loop(a, g, decay, real_step);
  taped_1_loop(a, g, decay, real_step);
}
static void sum_steps(const fused_args *a, const group *g, const waiting *w) {
  real *sums = g->sums;
}
#include "fused_walk.h"
