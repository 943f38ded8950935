/* Adjoint sweeps: gradients carried from each row's end to its begin, and what they leave on the way. */
#ifndef TIMELOOM_ADJOINT_H
#define TIMELOOM_ADJOINT_H
#include "sweep.h"

#define SUM_TOKENS 64 /* tokens whose gradients wait in cache before they are summed into the weights' */

/* Gate gradients of a row lie in `pre` in blocks of padded units: those that went through W_hh first, those that went
 * through W_ih last. GRU: inner, reset, update, candidate; LSTM: i, f, g, o; RNN: its one. */
#define BLOCKS(cell) GRADS(cell)
#define THROUGH(cell) GATES(cell) /* blocks that each of the weights has */
#define X_FROM(cell) ((cell) == GRU ? 1 : 0)

/* Layout of `sums`: (n, THROUGH) of W_hh transposed, (depth, THROUGH) of W_ih transposed, (BLOCKS) of the biases. */
INLINE long sums_size(const int cell, const sweep_args *a, long padded) {
  return ((a->n + a->depth) * THROUGH(cell) + BLOCKS(cell)) * padded;
}

/* Time of a row's step; it steps only inside its stretch and, in the lead, inside its sequence. */
INLINE long adjoint_time(const sweep_args *a, long row, long step) { return a->end[row] - 1 + a->lead - step; }
INLINE int adjoint_steps(const sweep_args *a, long row, long t) {
  return t >= a->begin[row] && a->end[row] > a->begin[row] && (!a->lead || t < a->lengths[a->seq[row]]);
}

/* Gate gradients of one tile: take the gates from the tape or compute them again from the state before the step, then
 * differentiate them. In: state = previous h (and c), next = gradient carried to the step's output. Out: next = the part
 * of the carry that passes by the gates, pre = gradients that go through weights. */
INLINE void adjoint_tile(const int cell, const int taped, const int rows, const sweep_args *a, group *g, float *pre_rows,
                         long r0, long j, long step) {
  const int gates = GATES(cell), grads = GRADS(cell), lanes = (int)(a->n - j * LANES), real = step >= a->lead;
  const long n = a->n, unit = j * LANES, padded = g->padded;
  const int again = !taped && (gates > 1 || a->zoned); /* an Elman unit's value tells its slope, if it is the step's */
  vec acc[TILE][MAX_GATES];
  if (again) {
    const float *h_rows[TILE];
    clear(rows, acc);
    const float *h_block = a->dropped ? g->shown : g->state[0];
    UNROLL for (int r = 0; r < rows; r++) h_rows[r] = h_block + (r0 + r) * padded;
    products(rows, gates, 0, n, h_rows, a->weights + j * n * gates * LANES, acc);
  }
  ROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r, t = adjoint_time(a, row, step);
    if (!adjoint_steps(a, row, t)) continue;
    const long token = t * a->batch + a->seq[row], at = (r0 + r) * padded + unit, back = AHEAD * a->batch;
    const float *u = taped ? a->tape + token * grads * n + unit : again ? input_row(cell, a, token) + unit : NULL;
    float *pre = pre_rows + (r0 + r) * padded * BLOCKS(cell) + unit;
    float *out = real && a->gate_grads ? a->gate_grads + token * grads * n + unit : NULL;
    if (u) fetch_ahead(u, -back * (taped ? grads * n : gates * n + masks_of(cell, a)), taped ? grads : gates, n);
    if (out) fetch_ahead(out, -back * grads * n, grads, n);
    vec carry = *(vec *)(g->next[0] + at), keep;
    if (a->incoming) {
      fetch_ahead(a->incoming + token * n + unit, -back * n, 1, n);
      carry += load(a->incoming + token * n + unit, lanes);
    }
    vec kept = splat(0.0f), past = splat(0.0f); /* share of h that kept itself, and the gradient that passes by it */
    if (a->zoned) {
      kept = load(kept_row(cell, a, token, 0) + unit, lanes);
      past = kept * carry;
      carry -= past;
    }
    if (cell == GRU) {
      vec h = *(vec *)(g->state[0] + at), reset, update, candidate, inner;
      if (taped) {
        reset = load(u, lanes), update = load(u + n, lanes);
        candidate = load(u + 2 * n, lanes), inner = load(u + 3 * n, lanes);
      } else {
        reset = sigmoid_vec(load(u, lanes) + acc[r][0]);
        update = sigmoid_vec(load(u + n, lanes) + acc[r][1]);
        inner = acc[r][2] + load(a->units + unit, lanes);
        candidate = tanh_vec(load(u + 2 * n, lanes) + reset * inner);
      }
      vec d_candidate = carry * (1.0f - update) * (1.0f - candidate * candidate);
      vec d_inner = d_candidate * reset;
      vec d_reset = d_candidate * inner * reset * (1.0f - reset);
      vec d_update = carry * (h - candidate) * update * (1.0f - update);
      *(vec *)pre = d_inner;
      *(vec *)(pre + padded) = d_reset;
      *(vec *)(pre + 2 * padded) = d_update;
      *(vec *)(pre + 3 * padded) = d_candidate;
      if (out) {
        store(out, d_reset, lanes);
        store(out + n, d_update, lanes);
        store(out + 2 * n, d_candidate, lanes);
        store(out + 3 * n, d_inner, lanes);
      }
      *(vec *)(g->next[0] + at) = carry * update + past;
      keep = update;
    } else if (cell == LSTM) {
      vec c = *(vec *)(g->state[1] + at), input, forget, candidate, output;
      if (taped) {
        input = load(u, lanes), forget = load(u + n, lanes);
        candidate = load(u + 2 * n, lanes), output = load(u + 3 * n, lanes);
      } else {
        input = sigmoid_vec(load(u, lanes) + acc[r][0]);
        forget = sigmoid_vec(load(u + n, lanes) + acc[r][1]);
        candidate = tanh_vec(load(u + 2 * n, lanes) + acc[r][2]);
        output = sigmoid_vec(load(u + 3 * n, lanes) + acc[r][3]);
      }
      vec squashed = tanh_vec(forget * c + input * candidate);
      vec carry_c = *(vec *)(g->next[1] + at), past_c = splat(0.0f);
      if (a->zoned) {
        kept = load(kept_row(cell, a, token, 1) + unit, lanes);
        past_c = kept * carry_c;
        carry_c -= past_c;
      }
      vec d_cell = carry_c + carry * output * (1.0f - squashed * squashed);
      vec d[4] = {d_cell * candidate * input * (1.0f - input), d_cell * c * forget * (1.0f - forget),
                  d_cell * input * (1.0f - candidate * candidate), carry * squashed * output * (1.0f - output)};
      UNROLL for (int i = 0; i < 4; i++) {
        *(vec *)(pre + i * padded) = d[i];
        if (out) store(out + i * n, d[i], lanes);
      }
      *(vec *)(g->next[0] + at) = past;
      *(vec *)(g->next[1] + at) = d_cell * forget + past_c;
      keep = forget;
    } else {
      vec h = load(u ? u : a->states[0] + (token + a->batch) * n + unit, lanes);
      if (again) h = activation(cell, h + acc[r][0]);
      vec d = rnn_slope(cell, h, carry);
      keep = rnn_slope(cell, h, load(a->units + unit, lanes));
      *(vec *)pre = d;
      if (out) store(out, d, lanes);
      *(vec *)(g->next[0] + at) = past;
    }
    keep += kept * (1.0f - keep); /* of the last part: an LSTM's c */
    if (real && a->decay) *(vec *)(g->decay + at) *= keep;
  }
}

/* acc = pre @ W for one tile, two blocks of outputs at a time: the packing puts them side by side as gates would be. */
INLINE void through_weights(const int cell, const int rows, long padded, const float *pre_rows, long r0, int from,
                            const float *weights, long j, vec acc[TILE][MAX_GATES]) {
  const float *grad_rows[TILE];
  const long depth = THROUGH(cell) * padded;
  clear(rows, acc);
  UNROLL for (int r = 0; r < rows; r++) grad_rows[r] = pre_rows + ((r0 + r) * BLOCKS(cell) + from) * padded;
  products(rows, 2, 0, depth, grad_rows, weights + j * depth * LANES, acc);
}

/* carry += pre @ W_hh */
INLINE void carry_tile(const int cell, const int rows, const sweep_args *a, group *g, const float *pre_rows, long r0,
                       long j, long step) {
  vec acc[TILE][MAX_GATES];
  through_weights(cell, rows, g->padded, pre_rows, r0, 0, a->transposed, j, acc);
  UNROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r;
    if (!adjoint_steps(a, row, adjoint_time(a, row, step))) continue;
    float *carry = g->next[0] + (r0 + r) * g->padded + j * LANES;
    const int lanes = (int)(a->n - j * LANES);
    if (a->dropped) {
      const float *mask = g->mask + (r0 + r) * g->padded + j * LANES;
      acc[r][0] *= *(const vec *)mask;
      if (lanes > LANES) acc[r][1] *= *(const vec *)(mask + LANES);
    }
    *(vec *)carry += acc[r][0];
    if (lanes > LANES) *(vec *)(carry + LANES) += acc[r][1];
  }
}

/* x_grads = pre @ W_ih */
INLINE void input_tile(const int cell, const int rows, const sweep_args *a, group *g, const float *pre_rows, long r0,
                       long j, long step) {
  vec acc[TILE][MAX_GATES];
  through_weights(cell, rows, g->padded, pre_rows, r0, X_FROM(cell), a->x_transposed, j, acc);
  UNROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r, t = adjoint_time(a, row, step);
    if (!adjoint_steps(a, row, t)) continue;
    float *to = a->x_grads + (t * a->batch + a->seq[row]) * (a->depth + masks_of(cell, a)) + j * LANES;
    const int lanes = (int)(a->depth - j * LANES);
    store(to, acc[r][0], lanes);
    if (lanes > LANES) store(to + LANES, acc[r][1], lanes - LANES);
  }
}

/* State before the step: the stored one, or the origin at a reset. */
INLINE void fetch_previous(const int cell, const int taped, const sweep_args *a, group *g, long step) {
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = adjoint_time(a, row, step), b = a->seq[row];
    if (!adjoint_steps(a, row, t)) continue;
    const int reset = a->resets && a->resets[t * a->batch + b];
    for (int part = cell == LSTM && taped; part < PARTS(cell); part++) { /* its tape spares h */
      const float *from = reset ? a->origin + (part * a->batch + b) * a->n : a->states[part] + (t * a->batch + b) * a->n;
      memcpy(row_of(g->state[part], g->padded, r), from, sizeof(float) * a->n);
      fetch_ahead(a->states[part] + (t * a->batch + b) * a->n, -AHEAD * a->batch * a->n, 1, 0);
    }
    if (a->dropped || a->zoned) fetch_masks(cell, a, t * a->batch + b, -AHEAD * a->batch);
    if (a->dropped) memcpy(row_of(g->mask, g->padded, r), mask_row(cell, a, t * a->batch + b), sizeof(float) * a->n);
    if (a->dropped && !taped && (GATES(cell) > 1 || a->zoned))
      show(row_of(g->state[0], g->padded, r), row_of(g->mask, g->padded, r), a->n, row_of(g->shown, g->padded, r));
  }
}

/* After a step that began with a reset: what was carried belongs to the origin, and nothing goes further back. */
INLINE void divert_resets(const int cell, const sweep_args *a, group *g, long step) {
  const int parts = PARTS(cell), real = step >= a->lead;
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = adjoint_time(a, row, step);
    if (!adjoint_steps(a, row, t) || !a->resets[t * a->batch + a->seq[row]]) continue;
    for (int part = 0; part < parts; part++) {
      float *carry = row_of(g->next[part], g->padded, r);
      if (real && a->reset_grads)
        for (long i = 0; i < a->n; i++) a->reset_grads[(row * parts + part) * a->n + i] += carry[i];
      memset(carry, 0, sizeof(float) * g->padded);
    }
    if (real && a->decay) memset(row_of(g->decay, g->padded, r), 0, sizeof(float) * g->padded);
  }
}

/* Tokens whose gate gradients are still in cache. */
typedef struct {
  long count;
  const float *previous[SUM_TOKENS + GROUP], *x[SUM_TOKENS + GROUP], *grads[SUM_TOKENS + GROUP];
} waiting;

static void sum_waiting(const int cell, const sweep_args *a, group *g, waiting *w) {
  const long columns = THROUGH(cell) * g->padded, all = BLOCKS(cell) * g->padded;
  float *by_h = g->sums, *by_x = by_h + a->n * columns, *by_bias = by_x + a->depth * columns;
  sum_outer(w->count, w->previous, a->n, w->grads, 0, columns, by_h);
  sum_outer(w->count, w->x, a->depth, w->grads, X_FROM(cell) * g->padded, columns, by_x);
  for (long column = 0; column < all; column += LANES) {
    vec sum = splat(0.0f);
    for (long k = 0; k < w->count; k++) sum += *(const vec *)(w->grads[k] + column);
    *(vec *)(by_bias + column) += sum;
  }
  w->count = 0;
}

INLINE void wait_for_sums(const int cell, const sweep_args *a, group *g, waiting *w, const float *pre_rows, long step) {
  float *seen = g->seen + (pre_rows - g->pre) / BLOCKS(cell);
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = adjoint_time(a, row, step), token = t * a->batch + a->seq[row];
    if (!adjoint_steps(a, row, t)) continue;
    w->previous[w->count] = a->states[0] + token * a->n;
    if (a->dropped) {
      show(w->previous[w->count], mask_row(cell, a, token), a->n, row_of(seen, g->padded, r));
      w->previous[w->count] = row_of(seen, g->padded, r);
    }
    w->x[w->count] = x_row(cell, a, token);
    w->grads[w->count++] = pre_rows + r * g->padded * BLOCKS(cell);
  }
}

/* What a row begins with in the lead: the gradient at its sequence's end, or none. */
static void enter_adjoint(const int parts, const sweep_args *a, group *g) {
  for (int part = 0; part < parts; part++) {
    memset(g->next[part], 0, sizeof(float) * g->count * g->padded);
    for (long r = 0; r < g->count; r++) {
      const long row = g->first + r, b = a->seq[row];
      if (a->end[row] + a->lead < a->lengths[b]) continue;
      memcpy(row_of(g->next[part], g->padded, r), a->final + (b * parts + part) * a->n, sizeof(float) * a->n);
    }
  }
}

#define TILES(call) \
  { \
    long r = 0; \
    for (; r + tile <= g->count; r += tile) call(tile) \
    for (; r + tile / 2 <= g->count; r += tile / 2) call(tile / 2) \
    for (; r < g->count; r++) call(1) \
  }

INLINE void adjoint_group(const int cell, const int taped, const sweep_args *a, group *g) {
  const int parts = PARTS(cell), tile = cell == LSTM && !taped ? TILE / 2 : TILE;
  const long blocks = g->padded / LANES, x_blocks = (a->depth + LANES - 1) / LANES;
  const long block = g->count * g->padded * BLOCKS(cell), slots = 1 + SUM_TOKENS / g->count;
  waiting w = {.count = 0};
  if (a->lead) enter_adjoint(parts, a, g);
  for (int part = 0; part < parts; part++) {
    if (!a->lead) load_rows(a, g, part, parts, g->next[part], a->ends);
    memset(g->state[part], 0, sizeof(float) * g->count * g->padded);
  }
  for (long i = 0; i < g->count * g->padded; i++) g->decay[i] = 1.0f;
  memset(g->pre, 0, sizeof(float) * block * (a->sums ? slots : 1));
  long slot = 0;
  for (long step = 0; step <= a->lead + g->longest; step++) {
    if (a->lead && step == a->lead)
      for (int part = 0; part < parts; part++) save_rows(a, g, part, parts, g->next[part], a->starts);
    if (step == a->lead + g->longest) break;
    float *pre = g->pre + slot * block;
    fetch_previous(cell, taped, a, g, step);
#define GATE_GRADS(rows) adjoint_tile(cell, taped, rows, a, g, pre, r, j, step);
    for (long j = 0; j < blocks; j++) TILES(GATE_GRADS)
#define CARRY(rows) carry_tile(cell, rows, a, g, pre, r, j, step);
    for (long j = 0; j < blocks; j += 2) TILES(CARRY)
    if (a->resets) divert_resets(cell, a, g, step);
    if (step < a->lead) continue;
#define INPUT(rows) input_tile(cell, rows, a, g, pre, r, j, step);
    if (a->x_grads)
      for (long j = 0; j < x_blocks; j += 2) TILES(INPUT)
    if (a->sums) {
      wait_for_sums(cell, a, g, &w, pre, step);
      slot = (slot + 1) % slots;
      if (slot == 0) sum_waiting(cell, a, g, &w);
    }
  }
  if (a->sums) sum_waiting(cell, a, g, &w);
  for (int part = 0; part < parts; part++) save_rows(a, g, part, parts, g->next[part], a->ends);
  save_decay(cell, a, g);
}

#endif
