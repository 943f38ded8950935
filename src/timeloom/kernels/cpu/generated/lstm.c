#define NAME lstm
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
#define SCRATCH 1
#define TOTALS 1
#define SUMMED 1
#define FORWARD_STEP forward_step
#define ADJOINT_STEP (a->tape ? taped_step : adjoint_step)
#define LOSS_IN_STEP 1
#include "fused_sums.h"
PRODUCTS(2, 2)
INLINE void forward_0(const V *in, V *out, const int decay) {
  const V v13 = in[5] + in[4];
  const V v14 = v_sigmoid(v13);
  const V v10 = in[3] + in[2];
  const V v11 = v_sigmoid(v10);
  const V v18 = in[8] * v11;
  const V v7 = in[1] + in[0];
  const V v8 = v_sigmoid(v7);
  const V v16 = in[7] + in[6];
  const V v17 = v_tanh(v16);
  const V v19 = v8 * v17;
  const V v20 = v18 + v19;
  const V v21 = v_tanh(v20);
  const V v22 = v14 * v21;
  out[0] = v22;
  out[1] = v20;
  out[2] = v8;
  out[3] = v11;
  out[4] = v17;
  out[5] = v14;
  if (decay) {
    out[6] = v11;
  }
}
INLINE void forward_0_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->state[0] + (r0 + r) * padded(a, 0) + 0 + k0;
    multiply(rows, g->alone, 1, 4, 4, depth, from, w, acc + 0);
  }
}
INLINE void forward_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[9], out[7];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = AHEAD * a->batch;
      real *const tape = a->tape + token * TAPE + unit;
      const long at1 = row * padded(a, 1) + unit;
      const long at0 = row * padded(a, 0) + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(input + N + ahead * a->input_stride);
      __builtin_prefetch(input + (3 * N) + ahead * a->input_stride);
      __builtin_prefetch(input + (2 * N) + ahead * a->input_stride);
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
      forward_0(in, out, decay);
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
ONCE void forward_0_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(4, forward_0)
}
ONCE void forward_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) forward_0_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES((ROWS / 2), 4, forward_0)
  meet(g);
}
static void forward_step(const fused_args *a, group *g, const int decay, const int real_step) {
  forward_0_loop(a, g, decay, real_step);
}
INLINE void adjoint_0(const V *in, V *out, const int decay) {
  const V v10 = in[3] + in[2];
  const V v11 = v_sigmoid(v10);
  const V v18 = in[8] * v11;
  const V v7 = in[1] + in[0];
  const V v8 = v_sigmoid(v7);
  const V v16 = in[7] + in[6];
  const V v17 = v_tanh(v16);
  const V v19 = v8 * v17;
  const V v20 = v18 + v19;
  const V v21 = v_tanh(v20);
  const V v24 = v21 * v21;
  const V v25 = v_const(1.0) - v24;
  const V v13 = in[5] + in[4];
  const V v14 = v_sigmoid(v13);
  const V v50 = v14 * in[9];
  const V v51 = v25 * v50;
  const V v52 = in[10] + v51;
  const V v55 = v11 * v52;
  out[0] = v55;
  const V v40 = v_const(1.0) - v8;
  const V v41 = v8 * v40;
  const V v53 = v17 * v52;
  const V v60 = v41 * v53;
  out[1] = v60;
  const V v37 = v_const(1.0) - v11;
  const V v38 = v11 * v37;
  const V v56 = in[8] * v52;
  const V v59 = v38 * v56;
  out[2] = v59;
  const V v31 = v17 * v17;
  const V v32 = v_const(1.0) - v31;
  const V v54 = v8 * v52;
  const V v57 = v32 * v54;
  out[3] = v57;
  const V v34 = v_const(1.0) - v14;
  const V v35 = v14 * v34;
  const V v49 = v21 * in[9];
  const V v58 = v35 * v49;
  out[4] = v58;
  out[5] = v60;
  out[6] = v59;
  out[7] = v57;
  out[8] = v58;
  if (decay) {
    out[9] = v11;
  }
}
INLINE void adjoint_0_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[0] + j * depth * 4 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->before[0][r0 + r] + 0 + k0;
    multiply(rows, g->alone, 1, 4, 4, depth, from, w, acc + 0);
  }
}
INLINE void adjoint_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[11], out[10];
      const real *const input = a->inputs + token * a->input_stride + unit;
      const long ahead = -AHEAD * a->batch;
      const real *const before1 = g->before[1][row] + unit;
      const long at0 = row * padded(a, 0) + unit;
      const long at1 = row * padded(a, 1) + unit;
      real *const written = g->out[row] + unit;
      __builtin_prefetch(input + 0 + ahead * a->input_stride);
      __builtin_prefetch(input + N + ahead * a->input_stride);
      __builtin_prefetch(input + (3 * N) + ahead * a->input_stride);
      __builtin_prefetch(input + (2 * N) + ahead * a->input_stride);
      __builtin_prefetch(before1 + 0 + ahead * N);
      in[0] = load_units(input + 0, lanes);
      in[1] = acc[r * 4 + 0];
      in[2] = load_units(input + N, lanes);
      in[3] = acc[r * 4 + 1];
      in[4] = load_units(input + (3 * N), lanes);
      in[5] = acc[r * 4 + 3];
      in[6] = load_units(input + (2 * N), lanes);
      in[7] = acc[r * 4 + 2];
      in[8] = load_units(before1 + 0, lanes);
      in[9] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[10] = *(const V *)(g->grad[1] + at1 + 0) + LOSS(1, 0 + unit);
      adjoint_0(in, out, decay);
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
ONCE void adjoint_0_single(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) SINGLE(4, adjoint_0)
}
ONCE void adjoint_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  if (g->count == 1) adjoint_0_single(a, g, decay, real_step);
  else OWN_BLOCKS(j, N, 1) TILES((ROWS / 2), 4, adjoint_0)
  meet(g);
}
INLINE void adjoint_1(const V *in, V *out, const int decay) {
  out[0] = in[0];
}
INLINE void adjoint_1_products(const int rows, const fused_args *a, group *g, const long r0, const long j, V *acc) {
  {
    const long depth = N, k0 = 0;
    const real *w = a->weights[1] + j * 4 * depth * 2 * WIDE, *from[ROWS];
    for (int r = 0; r < rows; r++) from[r] = g->out[r0 + r] + 0 + k0;
    multiply_2_2(rows, g->alone, 1, 4 * depth, from, w + 0 * depth * 2 * WIDE, acc + 0);
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
      V in[1], out[1];
      const long at0 = row * padded(a, 0) + unit;

      in[0] = acc[r * 2 + 0 + s];
      adjoint_1(in, out, decay);
      store_units(g->next[0] + at0 + 0, out[0], lanes);
      if (decay) {

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
static void adjoint_step(const fused_args *a, group *g, const int decay, const int real_step) {
  adjoint_0_loop(a, g, decay, real_step);
  adjoint_1_loop(a, g, decay, real_step);
}
INLINE void taped_0(const V *in, V *out, const int decay) {
  const V v5 = in[1] * in[0];
  const V v6 = in[3] * in[2];
  const V v7 = v5 + v6;
  const V v8 = v_tanh(v7);
  const V v10 = v8 * v8;
  const V v11 = v_const(1.0) - v10;
  const V v23 = in[4] * in[5];
  const V v24 = v11 * v23;
  const V v25 = in[6] + v24;
  const V v28 = in[0] * v25;
  out[0] = v28;
  const V v18 = v_const(1.0) - in[3];
  const V v19 = in[3] * v18;
  const V v26 = in[2] * v25;
  const V v33 = v19 * v26;
  out[1] = v33;
  const V v16 = v_const(1.0) - in[0];
  const V v17 = in[0] * v16;
  const V v29 = in[1] * v25;
  const V v32 = v17 * v29;
  out[2] = v32;
  const V v12 = in[2] * in[2];
  const V v13 = v_const(1.0) - v12;
  const V v27 = in[3] * v25;
  const V v30 = v13 * v27;
  out[3] = v30;
  const V v14 = v_const(1.0) - in[4];
  const V v15 = in[4] * v14;
  const V v22 = v8 * in[5];
  const V v31 = v15 * v22;
  out[4] = v31;
  out[5] = v33;
  out[6] = v32;
  out[7] = v30;
  out[8] = v31;
  if (decay) {
    out[9] = in[0];
  }
}
INLINE void taped_0_rows(const int rows, const fused_args *a, group *g, const int decay, const int real_step,
    const long r0, const long j, const V *acc) {
  ROLL for (int r = 0; r < rows; r++) {
    const long row = r0 + r, token = g->token[row];
    if (!g->steps[row]) continue;
    {
      const long unit = (j * 1 + 0) * WIDE, lanes = N - unit;
      
      V in[7], out[10];
      real *const tape = a->tape + token * TAPE + unit;
      const long ahead = -AHEAD * a->batch;
      const real *const before1 = g->before[1][row] + unit;
      const long at0 = row * padded(a, 0) + unit;
      const long at1 = row * padded(a, 1) + unit;
      real *const written = g->out[row] + unit;
      __builtin_prefetch(tape + N + ahead * TAPE);
      __builtin_prefetch(before1 + 0 + ahead * N);
      __builtin_prefetch(tape + (2 * N) + ahead * TAPE);
      __builtin_prefetch(tape + 0 + ahead * TAPE);
      __builtin_prefetch(tape + (3 * N) + ahead * TAPE);
      in[0] = load_units(tape + N, lanes);
      in[1] = load_units(before1 + 0, lanes);
      in[2] = load_units(tape + (2 * N), lanes);
      in[3] = load_units(tape + 0, lanes);
      in[4] = load_units(tape + (3 * N), lanes);
      in[5] = *(const V *)(g->grad[0] + at0 + 0) + LOSS(0, 0 + unit);
      in[6] = *(const V *)(g->grad[1] + at1 + 0) + LOSS(1, 0 + unit);
      taped_0(in, out, decay);
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
ONCE void taped_0_loop(const fused_args *a, group *g, const int decay, const int real_step) {
  OWN_BLOCKS(j, N, 1) taped_0_rows((int)g->count, a, g, decay, real_step, 0, j, NULL);
  meet(g);
}
INLINE void taped_1(const V *in, V *out, const int decay) {
  out[0] = in[0];
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
      V in[1], out[1];
      const long at0 = row * padded(a, 0) + unit;

      in[0] = acc[r * 2 + 0 + s];
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
