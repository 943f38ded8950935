/* Forward sweeps: states of all rows of a group, step by step. */
#ifndef TIMELOOM_FORWARD_H
#define TIMELOOM_FORWARD_H
#include "sweep.h"

/* Whether a row steps at time t: inside its stretch, and in the lead of one that is not empty. */
INLINE int forward_steps(const sweep_args *a, long row, long t) {
  return t >= 0 && t < a->end[row] && a->end[row] > a->begin[row];
}

/* A gate's argument: with x on hand (`fused`) the products hold all of it, else the projected input is added. */
INLINE vec argument(const int fused, const float *u, vec product, int lanes) {
  return fused ? product : load(u, lanes) + product;
}

/* One step of `rows` rows and one block of units. The step is the lead's for step < lead: nothing is written then. */
INLINE void forward_tile(const int cell, const int fused, const int rows, const sweep_args *a, group *g, long r0, long j,
                         long step) {
  const int gates = GATES(cell), grads = GRADS(cell), lanes = (int)(a->n - j * LANES), real = step >= a->lead;
  const long n = a->n, unit = j * LANES, padded = g->padded, masks = masks_of(cell, a);
  const float *h_rows[TILE], *x_rows[TILE];
  vec acc[TILE][MAX_GATES], from_x[TILE][MAX_GATES];
  clear(rows, acc);
  if (fused) { /* a sum by itself: each addition to the other one would round at the size of both */
    for (int r = 0; r < rows; r++) {
      const long row = g->first + r0 + r;
      long t = a->begin[row] - a->lead + step;
      t = forward_steps(a, row, t) ? t : 0; /* a row that does not step now reads what it may */
      x_rows[r] = x_row(cell, a, t * a->batch + a->seq[row]);
      fetch_ahead(x_rows[r], AHEAD * a->batch * (a->depth + masks) + unit, 1, 0);
    }
    products(rows, gates, cell == GRU, a->depth, x_rows, a->x_weights + j * a->depth * gates * LANES, acc);
    UNROLL for (int i = 0; i < gates; i++) {
      const vec bias = load(a->bias + i * n + unit, lanes);
      UNROLL for (int r = 0; r < rows; r++) acc[r][cell == GRU && i == 2 ? 3 : i] += bias;
    }
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int i = 0; i < MAX_GATES; i++) from_x[r][i] = acc[r][i];
    clear(rows, acc);
  }
  const float *h_block = a->dropped ? g->shown : g->state[0];
  UNROLL for (int r = 0; r < rows; r++) h_rows[r] = h_block + (r0 + r) * padded;
  products(rows, gates, 0, n, h_rows, a->weights + j * n * gates * LANES, acc);
  if (fused)
    UNROLL for (int r = 0; r < rows; r++)
      UNROLL for (int i = 0; i < MAX_GATES; i++) acc[r][i] += from_x[r][i];
  ROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r, t = a->begin[row] - a->lead + step;
    if (!forward_steps(a, row, t)) continue; /* its state stays */
    const long token = t * a->batch + a->seq[row], at = (r0 + r) * padded + unit;
    const float *u = fused ? NULL : input_row(cell, a, token) + unit;
    if (!fused) fetch_ahead(u, AHEAD * a->batch * (gates * n + masks), gates, n);
    float *tape = real && a->tape ? a->tape + token * grads * n + unit : NULL;
    if (tape) fetch_ahead(tape, AHEAD * a->batch * grads * n, grads, n);
    vec h = *(vec *)(g->state[0] + at), out, keep, kept[4];
    if (cell == GRU) {
      vec reset = sigmoid_vec(argument(fused, u, acc[r][0], lanes));
      vec update = sigmoid_vec(argument(fused, u + n, acc[r][1], lanes));
      vec inner = acc[r][2] + load(a->units + unit, lanes);
      vec candidate = tanh_vec(argument(fused, u + 2 * n, fused ? acc[r][3] : splat(0.0f), lanes) + reset * inner);
      out = candidate + update * (h - candidate);
      keep = update;
      kept[0] = reset, kept[1] = update, kept[2] = candidate, kept[3] = inner;
    } else if (cell == LSTM) {
      vec input = sigmoid_vec(argument(fused, u, acc[r][0], lanes));
      vec forget = sigmoid_vec(argument(fused, u + n, acc[r][1], lanes));
      vec candidate = tanh_vec(argument(fused, u + 2 * n, acc[r][2], lanes));
      vec output = sigmoid_vec(argument(fused, u + 3 * n, acc[r][3], lanes));
      vec before = *(vec *)(g->state[1] + at), c = forget * before + input * candidate;
      out = output * tanh_vec(c);
      if (a->zoned) c += load(kept_row(cell, a, token, 1) + unit, lanes) * (before - c);
      keep = forget;
      kept[0] = input, kept[1] = forget, kept[2] = candidate, kept[3] = output;
      *(vec *)(g->next[1] + at) = c;
      if (real && a->states[1]) store(a->states[1] + (token + a->batch) * n + unit, c, lanes);
    } else {
      vec pre = argument(fused, u, acc[r][0], lanes);
      out = activation(cell, pre);
      keep = rnn_slope(cell, out, load(a->units + unit, lanes));
      kept[0] = out;
    }
    if (a->zoned) {
      out += load(kept_row(cell, a, token, 0) + unit, lanes) * (h - out);
      keep += load(kept_row(cell, a, token, PARTS(cell) - 1) + unit, lanes) * (1.0f - keep);
    }
    *(vec *)(g->next[0] + at) = out;
    if (real && a->states[0]) store(a->states[0] + (token + a->batch) * n + unit, out, lanes);
    if (tape) UNROLL for (int i = 0; i < grads; i++) store(tape + i * n, kept[i], lanes);
    if (real && a->decay) *(vec *)(g->decay + at) *= keep;
  }
}

/* Before a step: rows at a reset take their origin, and forget what decayed so far. */
INLINE void apply_resets(const int cell, const sweep_args *a, group *g, long step) {
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = a->begin[row] - a->lead + step;
    if (!forward_steps(a, row, t) || !a->resets[t * a->batch + a->seq[row]]) continue;
    for (int part = 0; part < PARTS(cell); part++)
      memcpy(row_of(g->state[part], g->padded, r), a->origin + (part * a->batch + a->seq[row]) * a->n, sizeof(float) * a->n);
    if (a->decay && step >= a->lead) memset(row_of(g->decay, g->padded, r), 0, sizeof(float) * g->padded);
  }
}

/* Before a step, where there are masks: what the product with the weights sees of h. */
INLINE void show_rows(const int cell, const sweep_args *a, group *g, long step) {
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = a->begin[row] - a->lead + step;
    if (!forward_steps(a, row, t)) continue;
    const long token = t * a->batch + a->seq[row];
    fetch_masks(cell, a, token, AHEAD * a->batch);
    if (a->dropped)
      show(row_of(g->state[0], g->padded, r), mask_row(cell, a, token), a->n, row_of(g->shown, g->padded, r));
  }
}

INLINE void forward_step(const int cell, const int fused, const int tile, const sweep_args *a, group *g, long step) {
  for (long j = 0; j < g->padded / LANES; j++) {
    long r = 0;
    for (; r + tile <= g->count; r += tile) forward_tile(cell, fused, tile, a, g, r, j, step);
    for (; r + tile / 2 <= g->count; r += tile / 2) forward_tile(cell, fused, tile / 2, a, g, r, j, step);
    for (; r < g->count; r++) forward_tile(cell, fused, 1, a, g, r, j, step);
  }
  for (int part = 0; part < PARTS(cell); part++) {
    float *now = g->next[part], *before = g->state[part];
    for (long r = 0; r < g->count; r++) {
      if (!forward_steps(a, g->first + r, a->begin[g->first + r] - a->lead + step))
        memcpy(row_of(now, g->padded, r), row_of(before, g->padded, r), sizeof(float) * g->padded);
    }
    g->state[part] = now, g->next[part] = before;
  }
}

INLINE void forward_group(const int cell, const int fused, const int tile, const sweep_args *a, group *g) {
  const int parts = PARTS(cell);
  for (int part = 0; part < parts; part++) {
    if (a->lead) {
      memset(g->state[part], 0, sizeof(float) * g->count * g->padded);
      for (long r = 0; r < g->count; r++)
        memcpy(row_of(g->state[part], g->padded, r), a->origin + (part * a->batch + a->seq[g->first + r]) * a->n,
               sizeof(float) * a->n);
    } else {
      load_rows(a, g, part, parts, g->state[part], a->ends);
    }
    memset(g->next[part], 0, sizeof(float) * g->count * g->padded);
  }
  for (long i = 0; i < g->count * g->padded; i++) g->decay[i] = 1.0f;
  for (long step = 0; step <= a->lead + g->longest; step++) {
    if (a->lead && step == a->lead)
      for (int part = 0; part < parts; part++) save_rows(a, g, part, parts, g->state[part], a->starts);
    if (step == a->lead + g->longest) break;
    if (a->resets) apply_resets(cell, a, g, step);
    if (a->dropped || a->zoned) show_rows(cell, a, g, step);
    forward_step(cell, fused, tile, a, g, step);
  }
  for (int part = 0; part < parts; part++) save_rows(a, g, part, parts, g->state[part], a->ends);
  save_decay(cell, a, g);
}

#endif
