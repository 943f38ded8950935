/* What a sweep is given, the rows it walks with, and what forward and adjoint sweeps share. */
#ifndef TIMELOOM_SWEEP_H
#define TIMELOOM_SWEEP_H
#include "vectors.h"

#define GROUP 32 /* rows that walk together at most */
#define AHEAD 4L /* steps that memory is asked for in advance */

enum { GRU, LSTM, RNN_TANH, RNN_RELU };
#define GATES(cell) ((cell) == GRU ? 3 : (cell) == LSTM ? 4 : 1)
#define GRADS(cell) ((cell) == GRU || (cell) == LSTM ? 4 : 1) /* width of gate gradients and of the tape, in n */
#define PARTS(cell) ((cell) == LSTM ? 2 : 1)                  /* state parts: h, or h and c */

typedef struct {
  long batch, n, rows;
  long depth;                /* width of x */
  long lead;                 /* steps before a stretch (behind it, in an adjoint sweep) at which it is entered */
  long dropped;              /* whether rows of inputs, or of x, hold behind them what h is multiplied by: (n) */
  long zoned;                /* whether they hold, behind that, the share that each unit keeps: (parts * n) */
  const int64_t *seq, *begin, *end;
  const int64_t *lengths;    /* (B): adjoint with a lead: where sequences end */
  const uint8_t *resets;     /* (T, B) or NULL: the state is `origin` before such a step */
  const float *origin;       /* (parts, B, n): the state at a reset, and where a lead begins */
  const float *final;        /* (B, parts * n): adjoint with a lead: the gradient at a sequence's end */
  const float *inputs;       /* (T, B, gates * n, and masks): projected inputs; NULL where x is given */
  const float *x;            /* (T, B, depth, and masks): inputs to project on the way, or NULL */
  const float *bias;         /* (gates * n), with x */
  const float *units;        /* (n): the GRU's b_hn, inside the reset gate's product; the RNN's diagonal of W_hh */
  const float *weights;      /* packed for h @ W_hh^T */
  const float *x_weights;    /* packed for x @ W_ih^T, with x */
  const float *transposed;   /* packed for d @ W_hh (adjoint only) */
  const float *x_transposed; /* packed for d @ W_ih, with x_grads */
  float *states[2];          /* (T + 1, B, n) of h and c; forward: written unless NULL; adjoint: read */
  float *tape;               /* (T, B, grads * n) or NULL: values of the gates, of an Elman network what a unit would
                              * be if it did not keep itself; forward: written, adjoint: read */
  float *starts;             /* (rows, parts * n), with a lead: out: what the lead found where the stretch begins */
  float *ends;               /* (rows, parts * n): in, without a lead: what the stretch begins with; out: ends with */
  float *decay;               /* (rows, parts * n) or NULL: product of the diagonal transfer along the stretch */
  const float *incoming;     /* adjoint: (T, B, n) gradient on h, or NULL */
  float *gate_grads;         /* adjoint: (T, B, grads * n), or NULL */
  float *reset_grads;        /* adjoint: (rows, parts * n) or NULL: gradient that flowed into resets */
  float *x_grads;            /* adjoint: (T, B, depth, and masks, which are left alone), or NULL */
  float *sums;               /* adjoint: (threads, see sums_size) or NULL: gradients of weights and biases */
} sweep_args;

/* One group's scratch: `count` rows of padded vectors. */
typedef struct {
  long first, count, padded, longest;
  float *state[2], *next[2], *decay, *pre, *sums;
  float *shown; /* where h is dropped: what the product with the weights sees of it */
  float *mask;  /* and what it is multiplied by, in an adjoint sweep */
  float *seen;  /* the same of the states that wait to be summed */
} group;

INLINE float *row_of(float *block, long padded, long r) { return block + r * padded; }

/* Rows of x and of projected inputs: how long they are, and where their masks begin. */
INLINE long masks_of(const int cell, const sweep_args *a) { return (a->dropped + a->zoned * PARTS(cell)) * a->n; }
INLINE const float *x_row(const int cell, const sweep_args *a, long token) {
  return a->x + token * (a->depth + masks_of(cell, a));
}
INLINE const float *input_row(const int cell, const sweep_args *a, long token) {
  return a->inputs + token * (GATES(cell) * a->n + masks_of(cell, a));
}
INLINE const float *mask_row(const int cell, const sweep_args *a, long token) {
  return a->x ? x_row(cell, a, token) + a->depth : input_row(cell, a, token) + GATES(cell) * a->n;
}
/* The share that each unit of a part keeps over a step. */
INLINE const float *kept_row(const int cell, const sweep_args *a, long token, int part) {
  return mask_row(cell, a, token) + (a->dropped + part) * a->n;
}
#define ONCE static __attribute__((noinline)) /* small beside a step: to be compiled once */
ONCE void show(const float *h, const float *mask, long n, float *to) {
  for (long i = 0; i < n; i++) to[i] = h[i] * mask[i];
}

static void load_rows(const sweep_args *a, const group *g, int part, int parts, float *block, const float *from) {
  memset(block, 0, sizeof(float) * g->count * g->padded);
  for (long r = 0; r < g->count; r++)
    memcpy(row_of(block, g->padded, r), from + ((g->first + r) * parts + part) * a->n, sizeof(float) * a->n);
}
static void save_rows(const sweep_args *a, const group *g, int part, int parts, const float *block, float *to) {
  for (long r = 0; r < g->count; r++)
    memcpy(to + ((g->first + r) * parts + part) * a->n, block + r * g->padded, sizeof(float) * a->n);
}

/* The decay belongs to the last part of the state (h of a GRU, c of an LSTM); the other part has none, but over no steps
 * it stays what it is. */
static void save_decay(const int cell, const sweep_args *a, const group *g) {
  const int parts = PARTS(cell);
  if (!a->decay) return;
  save_rows(a, g, parts - 1, parts, g->decay, a->decay);
  if (parts == 1) return;
  for (long r = g->first; r < g->first + g->count; r++)
    for (long i = 0; i < a->n; i++) a->decay[r * parts * a->n + i] = a->end[r] > a->begin[r] ? 0.0f : 1.0f;
}

/* Rows are far apart in memory, and too many for the processor to see where each is going: tell it. `ahead` is a number
 * of floats, `blocks` vectors lie n apart. */
INLINE void fetch_ahead(const float *p, long ahead, const int blocks, long n) {
  UNROLL for (int i = 0; i < blocks; i++) __builtin_prefetch(p + ahead + i * n);
}

/* The Elman network's nonlinearity. */
INLINE vec activation(const int cell, vec x) {
  return cell == RNN_TANH ? tanh_vec(x) : select_vec(x <= 0.0f, splat(0.0f), x);
}
ONCE void fetch_masks(const int cell, const sweep_args *a, long token, long tokens) {
  const long masks = masks_of(cell, a), ahead = tokens * ((a->x ? a->depth : GATES(cell) * a->n) + masks);
  for (long i = 0; i < masks; i += 16) __builtin_prefetch(mask_row(cell, a, token) + ahead + i); /* a cache line each */
}

/* times the slope of the Elman network's nonlinearity, read off its output h */
INLINE vec rnn_slope(const int cell, vec h, vec times) {
  return cell == RNN_TANH ? times * (1.0f - h * h) : select_vec(h <= 0.0f, splat(0.0f), times);
}

#endif
