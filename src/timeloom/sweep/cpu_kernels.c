/* Chunk sweeps of GRU, LSTM and RNN on a CPU, float32.
 *
 * A sweep runs a list of segments. Segment r is the stretch begin[r] <= t < end[r] of sequence seq[r]; it starts
 * from its own state and never looks at another segment, so segments are rows of one batch. Rows are taken in
 * groups that fit a core's cache; a group walks its steps together, and each step is, for LANES hidden units
 * at a time: products with the recurrent weights in registers, then the gates, then the new state. Nothing but inputs
 * and states touches memory.
 *
 * Layouts (row-major): inputs (T, B, K) with K = gates * n; states (T + 1, B, n), states[t] being the state
 * *before* step t; weights packed in blocks of LANES units as [block][k][gate][LANES]. Hidden units are padded
 * with zeros to a multiple of LANES inside.
 *
 * The readable twin is sweep/reference.py; the equations are in cells/.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define TILE 8
#else
#define LANES 8
#define TILE 4
#endif
#define GROUP 32 /* rows that walk together at most */
#define MAX_GATES 4

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define ROLL _Pragma("GCC unroll 1") /* the gates of eight rows unrolled would not fit the instruction cache */

enum { GRU, LSTM, RNN_TANH, RNN_RELU };
#define GATES(cell) ((cell) == GRU ? 3 : (cell) == LSTM ? 4 : 1)
#define GRADS(cell) ((cell) == GRU || (cell) == LSTM ? 4 : 1) /* width of the gate gradients, in n */
#define PARTS(cell) ((cell) == LSTM ? 2 : 1)                  /* state parts: h, or h and c */

int timeloom_lanes(void) { return LANES; }

/* ---- elementary functions -------------------------------------------------------------------------------- */

INLINE vec select_vec(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec splat(float x) { return (vec){} + x; }

#if defined(__AVX512F__)
/* With a NaN these return their second operand, so NaN stays NaN. */
INLINE vec at_least(float low, vec x) { return (vec)_mm512_max_ps(_mm512_set1_ps(low), (__m512)x); }
INLINE vec at_most(float high, vec x) { return (vec)_mm512_min_ps(_mm512_set1_ps(high), (__m512)x); }
INLINE vec round_vec(vec x) { return (vec)_mm512_roundscale_ps((__m512)x, 0); }
INLINE vec times_power_of_two(vec x, vec n) { return (vec)_mm512_scalef_ps((__m512)x, (__m512)n); }
INLINE vec reciprocal(vec x) { /* an estimate good to 14 bits, and one Newton step */
  vec r = (vec)_mm512_rcp14_ps((__m512)x);
  return r + r * (1.0f - x * r);
}
#else
INLINE vec at_least(float low, vec x) { return select_vec(x < low, splat(low), x); }
INLINE vec at_most(float high, vec x) { return select_vec(x > high, splat(high), x); }
INLINE vec round_vec(vec x) { /* adding 1.5 * 2^23 leaves no room for a fraction */
  return (x + 12582912.0f) - 12582912.0f;
}
INLINE vec times_power_of_two(vec x, vec n) { /* -126 <= n <= 127 */
  return x * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}
INLINE vec reciprocal(vec x) { return 1.0f / x; }
#endif

/* exp(x) to about 1 ulp for |x| <= 87, held constant beyond; NaN stays NaN. */
INLINE vec exp_vec(vec x) {
  x = at_most(87.0f, at_least(-87.0f, x));
  vec n = round_vec(x * 1.442695041f);
  vec r = x - n * 0.693359375f; /* ln 2 in two pieces, the first exact in few bits */
  r = r + n * 2.12194440e-4f;
  vec p = splat(1.393374006e-03f); /* Chebyshev fit of (exp(r) - 1 - r) / r^2, error 1e-8 */
  p = p * r + 8.363239950e-03f;
  p = p * r + 4.166646411e-02f;
  p = p * r + 1.666657662e-01f;
  p = p * r + 5.000000014e-01f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return times_power_of_two(p, n);
}

INLINE vec sigmoid_vec(vec x) { return reciprocal(1.0f + exp_vec(-x)); }

/* tanh: an odd series below 0.55 (where the quotient would cancel), the quotient above. */
INLINE vec tanh_vec(vec x) {
  vec quotient = 1.0f - 2.0f * reciprocal(exp_vec(x + x) + 1.0f);
  vec s = x * x;
  vec p = splat(-6.272792019e-03f); /* Chebyshev fit of (tanh(x) - x) / x^3 in x^2, error 1e-9 */
  p = p * s + 2.107039870e-02f;
  p = p * s - 5.385190566e-02f;
  p = p * s + 1.333258083e-01f;
  p = p * s - 3.333331732e-01f;
  vec series = x + x * s * p;
  return select_vec(s < 0.3025f, series, quotient);
}

/* ---- vectors at the ragged edge of n ---------------------------------------------------------------------- */

INLINE vec load(const float *p, int lanes) {
  if (lanes >= LANES) return *(const vec *)p;
  vec v = {};
  for (int i = 0; i < lanes; i++) v[i] = p[i];
  return v;
}
INLINE void store(float *p, vec v, int lanes) {
  if (lanes >= LANES) { *(vec *)p = v; return; }
  for (int i = 0; i < lanes; i++) p[i] = v[i];
}

/* acc[r][g] = sum_k a[r][k] w[k][g][:] for `rows` rows; all loops over rows and gates are unrolled. */
INLINE void products(const int rows, const int gates, long depth, const float *a, long stride, const float *w,
                     vec acc[TILE][MAX_GATES]) {
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int g = 0; g < gates; g++) acc[r][g] = splat(0.0f);
  for (long k = 0; k < depth; k++) {
    vec wk[MAX_GATES];
    UNROLL for (int g = 0; g < gates; g++) wk[g] = *(const vec *)(w + (k * gates + g) * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
      vec ar = splat(a[r * stride + k]);
      UNROLL for (int g = 0; g < gates; g++) acc[r][g] += ar * wk[g];
    }
  }
}

/* ---- what a sweep is given -------------------------------------------------------------------------------- */

typedef struct {
  long batch, n, rows;
  const int64_t *seq, *begin, *end;
  const uint8_t *resets;     /* (T, B) or NULL: the state is `origin` before such a step */
  const float *origin;       /* (parts, B, n): the state at a reset */
  const float *inputs;       /* (T, B, gates * n) */
  const float *units;        /* (n): the GRU's b_hn, inside the reset gate's product; the RNN's diagonal of W_hh */
  const float *weights;      /* packed for h @ W_hh^T */
  const float *transposed;   /* packed for d @ W_hh (adjoint only) */
  float *states[2];          /* (T + 1, B, n) of h and c; forward: written unless NULL; adjoint: read */
  float *ends;               /* (rows, parts * n): forward in: starts, out: ends; adjoint in: ends, out: starts */
  float *leak;               /* (rows, parts * n) or NULL: product of the diagonal transfer along the segment */
  const float *incoming;     /* adjoint: (T, B, n) gradient on h, or NULL */
  float *gate_grads;         /* adjoint: (T, B, grads * n), or NULL */
  float *reset_grads;        /* adjoint: (rows, parts * n) or NULL: gradient that flowed into resets */
} sweep_args;

/* One group's scratch: `count` rows of padded vectors. */
typedef struct {
  long first, count, padded, longest;
  float *state[2], *next[2], *leak, *pre;
} group;

INLINE float *row_of(float *block, long padded, long r) { return block + r * padded; }

static void load_rows(const sweep_args *a, const group *g, int part, int parts, float *block, const float *from) {
  memset(block, 0, sizeof(float) * g->count * g->padded);
  for (long r = 0; r < g->count; r++)
    memcpy(row_of(block, g->padded, r), from + ((g->first + r) * parts + part) * a->n, sizeof(float) * a->n);
}
static void save_rows(const sweep_args *a, const group *g, int part, int parts, const float *block, float *to) {
  for (long r = 0; r < g->count; r++)
    memcpy(to + ((g->first + r) * parts + part) * a->n, block + r * g->padded, sizeof(float) * a->n);
}

/* times the slope of the Elman network's nonlinearity, read off its output h */
INLINE vec rnn_slope(const int cell, vec h, vec times) {
  return cell == RNN_TANH ? times * (1.0f - h * h) : select_vec(h > 0.0f, times, splat(0.0f));
}

/* ---- forward ---------------------------------------------------------------------------------------------- */

INLINE void forward_tile(const int cell, const int rows, const sweep_args *a, group *g, long r0, long j, long step) {
  const int gates = GATES(cell);
  const long n = a->n, unit = j * LANES, padded = g->padded;
  const int lanes = (int)(n - unit);
  vec acc[TILE][MAX_GATES];
  products(rows, gates, n, g->state[0] + r0 * padded, padded, a->weights + j * n * gates * LANES, acc);
  ROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r, t = a->begin[row] + step;
    if (t >= a->end[row]) continue; /* this row has finished: its state stays */
    const float *u = a->inputs + (t * a->batch + a->seq[row]) * gates * n + unit;
    const long at = (r0 + r) * padded + unit;
    vec h = *(vec *)(g->state[0] + at), out, keep = splat(0.0f);
    if (cell == GRU) {
      vec reset = sigmoid_vec(load(u, lanes) + acc[r][0]);
      vec update = sigmoid_vec(load(u + n, lanes) + acc[r][1]);
      vec inner = acc[r][2] + load(a->units + unit, lanes);
      vec candidate = tanh_vec(load(u + 2 * n, lanes) + reset * inner);
      out = candidate + update * (h - candidate);
      keep = update;
    } else if (cell == LSTM) {
      vec input = sigmoid_vec(load(u, lanes) + acc[r][0]);
      vec forget = sigmoid_vec(load(u + n, lanes) + acc[r][1]);
      vec candidate = tanh_vec(load(u + 2 * n, lanes) + acc[r][2]);
      vec output = sigmoid_vec(load(u + 3 * n, lanes) + acc[r][3]);
      vec c = forget * *(vec *)(g->state[1] + at) + input * candidate;
      out = output * tanh_vec(c);
      keep = forget;
      *(vec *)(g->next[1] + at) = c;
      if (a->states[1]) store(a->states[1] + ((t + 1) * a->batch + a->seq[row]) * n + unit, c, lanes);
    } else {
      vec pre = load(u, lanes) + acc[r][0];
      out = cell == RNN_TANH ? tanh_vec(pre) : select_vec(pre <= 0.0f, splat(0.0f), pre);
      keep = rnn_slope(cell, out, load(a->units + unit, lanes));
    }
    *(vec *)(g->next[0] + at) = out;
    if (a->states[0]) store(a->states[0] + ((t + 1) * a->batch + a->seq[row]) * n + unit, out, lanes);
    if (a->leak) *(vec *)(g->leak + at) *= keep;
  }
}

/* Before a step: rows at a reset take their origin, and forget what leaked so far. */
INLINE void apply_resets(const int cell, const sweep_args *a, group *g, long step) {
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = a->begin[row] + step;
    if (t >= a->end[row] || !a->resets[t * a->batch + a->seq[row]]) continue;
    for (int part = 0; part < PARTS(cell); part++)
      memcpy(row_of(g->state[part], g->padded, r), a->origin + (part * a->batch + a->seq[row]) * a->n, sizeof(float) * a->n);
    if (a->leak) memset(row_of(g->leak, g->padded, r), 0, sizeof(float) * g->padded);
  }
}

/* The leak belongs to the last part of the state (h of a GRU, c of an LSTM); the other part has none. */
static void save_leak(const int cell, const sweep_args *a, const group *g) {
  const int parts = PARTS(cell);
  if (!a->leak) return;
  if (parts == 2) {
    memset(g->pre, 0, sizeof(float) * g->count * g->padded);
    save_rows(a, g, 0, parts, g->pre, a->leak);
  }
  save_rows(a, g, parts - 1, parts, g->leak, a->leak);
}

INLINE void forward_group(const int cell, const int tile, const sweep_args *a, group *g) {
  const int parts = PARTS(cell);
  const long blocks = g->padded / LANES;
  for (int part = 0; part < parts; part++) {
    load_rows(a, g, part, parts, g->state[part], a->ends);
    memset(g->next[part], 0, sizeof(float) * g->count * g->padded);
  }
  for (long i = 0; i < g->count * g->padded; i++) g->leak[i] = 1.0f;
  for (long step = 0; step < g->longest; step++) {
    if (a->resets) apply_resets(cell, a, g, step);
    for (long j = 0; j < blocks; j++) {
      long r = 0;
      for (; r + tile <= g->count; r += tile) forward_tile(cell, tile, a, g, r, j, step);
      for (; r + tile / 2 <= g->count; r += tile / 2) forward_tile(cell, tile / 2, a, g, r, j, step);
      for (; r < g->count; r++) forward_tile(cell, 1, a, g, r, j, step);
    }
    for (int part = 0; part < parts; part++)
      for (long r = 0; r < g->count; r++)
        if (a->begin[g->first + r] + step < a->end[g->first + r])
          memcpy(row_of(g->state[part], g->padded, r), row_of(g->next[part], g->padded, r), sizeof(float) * g->padded);
  }
  for (int part = 0; part < parts; part++) save_rows(a, g, part, parts, g->state[part], a->ends);
  save_leak(cell, a, g);
}

/* ---- adjoint ---------------------------------------------------------------------------------------------- */

/* Gate gradients of one tile: recompute the gates from the state before the step, then differentiate them.
 * In: state = previous h (and c), next = gradient carried to the step's output. Out: next = the part of the carry
 * that passes by the gates, pre = gradients that go through the recurrent weights, (rows, gates, padded). */
INLINE void adjoint_tile(const int cell, const int rows, const sweep_args *a, group *g, long r0, long j, long step) {
  const int gates = GATES(cell), grads = GRADS(cell);
  const long n = a->n, unit = j * LANES, padded = g->padded;
  const int lanes = (int)(n - unit);
  vec acc[TILE][MAX_GATES];
  if (gates > 1) products(rows, gates, n, g->state[0] + r0 * padded, padded, a->weights + j * n * gates * LANES, acc);
  ROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r, t = a->end[row] - 1 - step;
    if (t < a->begin[row]) continue;
    const long token = t * a->batch + a->seq[row], at = (r0 + r) * padded + unit;
    const float *u = a->inputs + token * gates * n + unit;
    float *pre = g->pre + (r0 + r) * padded * gates + unit;
    float *out = a->gate_grads ? a->gate_grads + token * grads * n + unit : NULL;
    vec carry = *(vec *)(g->next[0] + at), keep = splat(0.0f);
    if (a->incoming) carry += load(a->incoming + token * n + unit, lanes);
    if (cell == GRU) {
      vec h = *(vec *)(g->state[0] + at);
      vec reset = sigmoid_vec(load(u, lanes) + acc[r][0]);
      vec update = sigmoid_vec(load(u + n, lanes) + acc[r][1]);
      vec inner = acc[r][2] + load(a->units + unit, lanes);
      vec candidate = tanh_vec(load(u + 2 * n, lanes) + reset * inner);
      vec d_candidate = carry * (1.0f - update) * (1.0f - candidate * candidate);
      vec d_inner = d_candidate * reset;
      vec d_reset = d_candidate * inner * reset * (1.0f - reset);
      vec d_update = carry * (h - candidate) * update * (1.0f - update);
      *(vec *)pre = d_reset;
      *(vec *)(pre + padded) = d_update;
      *(vec *)(pre + 2 * padded) = d_inner;
      if (out) {
        store(out, d_reset, lanes);
        store(out + n, d_update, lanes);
        store(out + 2 * n, d_candidate, lanes);
        store(out + 3 * n, d_inner, lanes);
      }
      *(vec *)(g->next[0] + at) = carry * update;
      keep = update;
    } else if (cell == LSTM) {
      vec c = *(vec *)(g->state[1] + at);
      vec input = sigmoid_vec(load(u, lanes) + acc[r][0]);
      vec forget = sigmoid_vec(load(u + n, lanes) + acc[r][1]);
      vec candidate = tanh_vec(load(u + 2 * n, lanes) + acc[r][2]);
      vec output = sigmoid_vec(load(u + 3 * n, lanes) + acc[r][3]);
      vec squashed = tanh_vec(forget * c + input * candidate);
      vec d_cell = *(vec *)(g->next[1] + at) + carry * output * (1.0f - squashed * squashed);
      vec d[4] = {d_cell * candidate * input * (1.0f - input), d_cell * c * forget * (1.0f - forget),
                  d_cell * input * (1.0f - candidate * candidate), carry * squashed * output * (1.0f - output)};
      UNROLL for (int i = 0; i < 4; i++) {
        *(vec *)(pre + i * padded) = d[i];
        if (out) store(out + i * n, d[i], lanes);
      }
      *(vec *)(g->next[0] + at) = splat(0.0f);
      *(vec *)(g->next[1] + at) = d_cell * forget;
      keep = forget;
    } else {
      vec h = load(a->states[0] + (token + a->batch) * n + unit, lanes);
      vec d = rnn_slope(cell, h, carry);
      keep = rnn_slope(cell, h, load(a->units + unit, lanes));
      *(vec *)pre = d;
      if (out) store(out, d, lanes);
      *(vec *)(g->next[0] + at) = splat(0.0f);
    }
    if (a->leak) *(vec *)(g->leak + at) *= keep;
  }
}

/* carry += pre @ W_hh for one tile, two blocks of units at a time: the packing puts them side by side as gates would be. */
INLINE void carry_tile(const int cell, const int rows, const sweep_args *a, group *g, long r0, long j, long step) {
  const int gates = GATES(cell);
  const long padded = g->padded, depth = gates * padded;
  vec acc[TILE][MAX_GATES];
  products(rows, 2, depth, g->pre + r0 * depth, depth, a->transposed + j * depth * LANES, acc);
  UNROLL for (int r = 0; r < rows; r++) {
    const long row = g->first + r0 + r;
    if (a->end[row] - 1 - step < a->begin[row]) continue;
    float *carry = g->next[0] + (r0 + r) * padded + j * LANES;
    *(vec *)carry += acc[r][0];
    if ((j + 1) * LANES < padded) *(vec *)(carry + LANES) += acc[r][1];
  }
}

/* State before the step: the stored one, or the origin at a reset. */
INLINE void fetch_previous(const int cell, const sweep_args *a, group *g, long step) {
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = a->end[row] - 1 - step, b = a->seq[row];
    if (t < a->begin[row]) continue;
    const int reset = a->resets && a->resets[t * a->batch + b];
    for (int part = 0; part < PARTS(cell); part++) {
      const float *from = reset ? a->origin + (part * a->batch + b) * a->n : a->states[part] + (t * a->batch + b) * a->n;
      memcpy(row_of(g->state[part], g->padded, r), from, sizeof(float) * a->n);
    }
  }
}

/* After a step that began with a reset: what was carried belongs to the origin, and nothing goes further back. */
INLINE void divert_resets(const int cell, const sweep_args *a, group *g, long step) {
  const int parts = PARTS(cell);
  for (long r = 0; r < g->count; r++) {
    const long row = g->first + r, t = a->end[row] - 1 - step;
    if (t < a->begin[row] || !a->resets[t * a->batch + a->seq[row]]) continue;
    for (int part = 0; part < parts; part++) {
      float *carry = row_of(g->next[part], g->padded, r);
      if (a->reset_grads)
        for (long i = 0; i < a->n; i++) a->reset_grads[(row * parts + part) * a->n + i] += carry[i];
      memset(carry, 0, sizeof(float) * g->padded);
    }
    if (a->leak) memset(row_of(g->leak, g->padded, r), 0, sizeof(float) * g->padded);
  }
}

INLINE void adjoint_group(const int cell, const int tile, const sweep_args *a, group *g) {
  const int parts = PARTS(cell);
  const long blocks = g->padded / LANES;
  for (int part = 0; part < parts; part++) {
    load_rows(a, g, part, parts, g->next[part], a->ends);
    memset(g->state[part], 0, sizeof(float) * g->count * g->padded);
  }
  for (long i = 0; i < g->count * g->padded; i++) g->leak[i] = 1.0f;
  memset(g->pre, 0, sizeof(float) * g->count * g->padded * GATES(cell));
  for (long step = 0; step < g->longest; step++) {
    if (GATES(cell) > 1) fetch_previous(cell, a, g, step);
    for (long j = 0; j < blocks; j++) {
      long r = 0;
      for (; r + tile <= g->count; r += tile) adjoint_tile(cell, tile, a, g, r, j, step);
      for (; r + tile / 2 <= g->count; r += tile / 2) adjoint_tile(cell, tile / 2, a, g, r, j, step);
      for (; r < g->count; r++) adjoint_tile(cell, 1, a, g, r, j, step);
    }
    for (long j = 0; j < blocks; j += 2) {
      long r = 0;
      for (; r + TILE <= g->count; r += TILE) carry_tile(cell, TILE, a, g, r, j, step);
      for (; r + TILE / 2 <= g->count; r += TILE / 2) carry_tile(cell, TILE / 2, a, g, r, j, step);
      for (; r < g->count; r++) carry_tile(cell, 1, a, g, r, j, step);
    }
    if (a->resets) divert_resets(cell, a, g, step);
  }
  for (int part = 0; part < parts; part++) save_rows(a, g, part, parts, g->next[part], a->ends);
  save_leak(cell, a, g);
}

/* ---- all groups, on all threads --------------------------------------------------------------------------- */

typedef void walk(const sweep_args *, group *);

/* Returns 0, or 1 where memory for a group's scratch could not be had. */
static int run(walk *walk_group, int tile, const sweep_args *a, int threads) {
  const long padded = (a->n + LANES - 1) / LANES * LANES;
  long size = (a->rows + threads - 1) / threads;
  size = size > GROUP ? GROUP : size > tile ? (size + tile - 1) / tile * tile : size;
  const long groups = (a->rows + size - 1) / size;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : failed) if (threads > 1 && groups > 1)
  for (long i = 0; i < groups; i++) {
    group g = {.first = i * size, .padded = padded};
    g.count = a->rows - g.first < size ? a->rows - g.first : size;
    for (long r = g.first; r < g.first + g.count; r++)
      if (a->end[r] - a->begin[r] > g.longest) g.longest = a->end[r] - a->begin[r];
    const long block = g.count * padded;
    float *scratch = NULL;
    if (posix_memalign((void **)&scratch, 64, sizeof(float) * block * (5 + MAX_GATES))) {
      failed |= 1;
      continue;
    }
    g.state[0] = scratch, g.state[1] = scratch + block, g.next[0] = scratch + 2 * block, g.next[1] = scratch + 3 * block;
    g.leak = scratch + 4 * block, g.pre = scratch + 5 * block;
    walk_group(a, &g);
    free(scratch);
  }
  return failed;
}

/* `tile` is how many rows the registers hold beside the weights: TILE, and less for the LSTM's four gates. */
#define EXPORT(name, cell, tile) \
  static void name##_forward_group(const sweep_args *a, group *g) { forward_group(cell, tile, a, g); } \
  static void name##_adjoint_group(const sweep_args *a, group *g) { adjoint_group(cell, tile, a, g); } \
  int timeloom_##name##_forward(const sweep_args *a, int threads) { return run(name##_forward_group, tile, a, threads); } \
  int timeloom_##name##_adjoint(const sweep_args *a, int threads) { return run(name##_adjoint_group, tile, a, threads); }
EXPORT(gru, GRU, TILE)
EXPORT(lstm, LSTM, TILE * 3 / 4)
EXPORT(rnn_tanh, RNN_TANH, TILE)
EXPORT(rnn_relu, RNN_RELU, TILE)
