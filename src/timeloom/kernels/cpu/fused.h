/* Sweeps of a step that was compiled: how rows walk through time. What a step does is generated: it is included between
 * the two halves of this file, by the generated source, which defines
 *
 *   NAME                what the functions that it exports are called by: timeloom_NAME_forward and _adjoint
 *   PARTS, SIZE         parts of the state, and their widths together
 *   PART_WIDTHS         widths of the parts, PART_OFFSETS where they begin in a whole state
 *   WRITTEN             width of what an adjoint step writes out
 *   SCRATCH, TOTALS     numbers and sums that a row keeps between the loops of a step, at most
 *   SUMMED              vectors of units that such a sum is made of, at most
 *   DECAYING            bits of the parts that keep something of themselves
 *   ADDED               whether an adjoint step adds to the next gradient, rather than sets it
 *   TAPE                width of what a forward step keeps for the adjoint one
 *   SUMS                numbers that sums over steps of what is written out have
 *   COPIED              gradients of inputs to be copied from what is written out: their COPIED_WIDTHS, where they lie
 *                       there, COPIED_FROM, and among the inputs, COPIED_TO
 *   LOSS_IN_STEP        whether the step itself adds what the loss adds to a gradient
 *   FORWARD_STEP, ADJOINT_STEP, or one of them: (const fused_args *, group *, int decay, int real)
 *   sum_steps (const fused_args *, const group *, const waiting *), with the second one
 *
 * Widths are numbers, or made of N and DEPTH: a text then serves a cell of any width, over x of any width.
 *
 * The readable twin is kernels/reference.py. */
#ifndef TIMELOOM_FUSED_H
#define TIMELOOM_FUSED_H
#include <omp.h>
#include "elements.h"
#include "team.h"
#include "tiny.h"

#define ONCE static __attribute__((noinline))
#define GROUP 32 /* rows that walk together at most */
#define MOST_TEAMS 64 /* groups of rows that threads share, at most */
#define AHEAD 4L /* steps that memory is asked for in advance */
#define SUM_TOKENS 64 /* steps of rows that wait in cache before they are summed */
#define ROUND_UP(n) (((n) + WIDE - 1) / WIDE * WIDE)
/* Vectors a power of two apart would all fall into a few sets of the cache: they are moved on by one V. */
#define SLOT_STRIDE (ROUND_UP(SCRATCH) + WIDE)
#define WRITTEN_STRIDE (ROUND_UP(WRITTEN) + WIDE)
#if WIDE == LANES && LANES == 16
#define ROWS 8 /* rows whose sums fit the registers beside each other, with few sums a row */
#else
#define ROWS 4
#endif

#define N (a->n)
#define DEPTH (a->depth)
#define ALIGNED(n) ((n) > 16 ? ((n) + 15) / 16 * 16 : (n))
#define MOST(one, other) ((one) > (other) ? (one) : (other))

typedef struct {
  long batch, rows;
  long together, members; /* rows that are walked together by so many threads, which share their units; 0: one thread each */
  long n, depth;          /* where the text is for any width: the units of a part of the state, and the width of x */
  long input_stride;      /* numbers from one row of inputs to the next: there may be masks behind them */
  long lead;              /* steps before a stretch (behind it, in an adjoint sweep) at which it is entered */
  long incoming_width;    /* leading part of the state that `incoming` is the gradient of */
  const int64_t *seq, *begin, *end;
  const int64_t *lengths; /* (B): adjoint with a lead: where sequences end */
  const uint8_t *resets;  /* (T, B) or NULL: the state is `origin` before such a step */
  const real *origin;     /* (B, SIZE): the state at a reset, and where a lead begins */
  const real *final;      /* (B, SIZE): adjoint with a lead: the gradient at a sequence's end */
  const real *inputs;     /* (T, B, input_stride) */
  const real *const *masks; /* vectors without gradients: rows (T, B) of each, mask_strides apart */
  const long *mask_strides;
  real *starts;           /* (rows, SIZE), with a lead: out: what the lead found where the stretch begins */
  real *ends;             /* (rows, SIZE): in, without a lead: what the stretch begins with; out: ends with */
  real *decay;            /* (rows, SIZE) or NULL: product of what units keep of themselves along the stretch */
  const real *incoming;   /* adjoint: (T, B, incoming_width) gradient on states, or NULL */
  real *written;          /* adjoint: (T, B, WRITTEN), or NULL */
  real *sums;             /* adjoint: (threads, SUMS) or NULL: sums over all steps of what is written, added to */
  real *input_grads;      /* adjoint, with sums: (T, B, input_stride), or NULL */
  real *tape;             /* (T, B, TAPE) or NULL; forward: written at real steps; adjoint: read */
  real *reset_grads;      /* adjoint: (rows, SIZE) or NULL: gradient that flowed into resets */
  real *const *states;    /* (T + 1, B, part) of every part; forward: written unless NULL; adjoint: read */
  const real *const *weights; /* packed stacks of matrices */
  const real *const *units;   /* per-unit vectors */
} fused_args;

/* Rows that walk together, and their scratch: vectors of `count` rows, each padded to whole V's. */
typedef struct {
  team *others;       /* threads that share the units of these rows, or NULL */
  long member, members, met; /* which of them this is, of how many, and how often they have met */
  long first, count, longest;
  int turned;         /* whether this step takes blocks of units from the last one on */
  int alone;          /* whether groups are of one row each: one that is left over is rounded as those in full ones */
  real *state[PARTS], *next[PARTS], *grad[PARTS], *decay[PARTS];
  real *slots;        /* SCRATCH numbers a row, SLOT_STRIDE apart */
  V *partial;         /* what a row's TOTALS sums are made of: SUMMED vectors of units each, at most */
  real totals[GROUP * TOTALS]; /* the sums */
  const real *before[PARTS][GROUP]; /* adjoint: the state before every row's step, where it is stored */
  real *ring, *sums;  /* adjoint: room for what is written and not to be stored, and this thread's sums */
  long slots_of_ring; /* steps that there is room for */
  real *out[GROUP];   /* adjoint: where every row writes out */
  long token[GROUP];  /* t * batch + sequence of every row's step */
  char steps[GROUP];  /* whether it makes one */
} group;

/* Steps of rows that are still to be summed: the state before each, its inputs, and what it has written. */
typedef struct {
  long count;
  const real *before[PARTS][SUM_TOKENS + GROUP], *inputs[SUM_TOKENS + GROUP], *written[SUM_TOKENS + GROUP];
} waiting;

INLINE long part_width(const fused_args *a, int part) {
  const long widths[PARTS] = PART_WIDTHS;
  return widths[part];
}
INLINE long part_offset(const fused_args *a, int part) {
  const long offsets[PARTS] = PART_OFFSETS;
  return offsets[part];
}
INLINE long padded(const fused_args *a, int part) { return ROUND_UP(part_width(a, part)); }

#if defined(__AVX512F__) && WIDE == 16
#define MASK(lanes) (__mmask16)((1u << (lanes)) - 1)
INLINE V load_some(const real *p, long lanes) { return (V)_mm512_maskz_loadu_ps(MASK(lanes), p); }
INLINE void store_some(real *p, V v, long lanes) { _mm512_mask_storeu_ps(p, MASK(lanes), (__m512)v); }
#elif defined(__AVX512F__)
#define MASK(lanes) (__mmask8)((1u << (lanes)) - 1)
INLINE V load_some(const real *p, long lanes) { return (V)_mm512_maskz_loadu_pd(MASK(lanes), p); }
INLINE void store_some(real *p, V v, long lanes) { _mm512_mask_storeu_pd(p, MASK(lanes), (__m512d)v); }
#else
INLINE V load_some(const real *p, long lanes) {
  V v = {};
  for (int i = 0; i < lanes; i++) v[i] = p[i];
  return v;
}
INLINE void store_some(real *p, V v, long lanes) {
  for (int i = 0; i < lanes; i++) p[i] = v[i];
}
#endif
/* Vectors at the ragged edge: the units that there are. */
INLINE V load_units(const real *p, long lanes) { return lanes >= WIDE ? *(const V *)p : load_some(p, lanes); }
INLINE void store_units(real *p, V v, long lanes) {
  if (lanes >= WIDE) *(V *)p = v;
  else store_some(p, v, lanes);
}
/* Asks for all of some rows, `ahead` numbers on. */
INLINE void fetch_rows(const int rows, const real *const *from, long ahead, long depth) {
  for (int r = 0; r < rows; r++)
    for (long k = 0; k < depth; k += 64 / (long)sizeof(real)) __builtin_prefetch(from[r] + ahead + k);
}
/* What the loss itself adds to the gradient by a part of a state. */
INLINE V loss_of(const fused_args *a, const group *g, int part, long row, long at, long lanes) {
  const long offset = part_offset(a, part);
  if (!a->incoming || offset >= a->incoming_width) return (V){};
  const real *added = a->incoming + g->token[row] * a->incoming_width + offset + at;
  __builtin_prefetch(added - AHEAD * a->batch * a->incoming_width);
  return load_units(added, lanes);
}
#define LOSS(part, at) (LOSS_IN_STEP ? loss_of(a, g, part, row, at, lanes) : (V){})
INLINE V only(V v, long lanes) { /* the units that there are: sums must not see the padding */
  if (lanes < WIDE)
    for (int i = (int)lanes; i < WIDE; i++) v[i] = 0;
  return v;
}
#if WIDE == 16
#define HOLD(v) IN_REGISTER(v)
#else
#define HOLD(v)
#endif
/* acc[r][c] = sum_k a[r][k] w[k][c][:] for `columns` vectors of units side by side, or, unless `fresh`, that is added; the
 * sums of a row lie among `all` of its sums. Loops over rows and columns are unrolled. */
INLINE void multiply(const int rows, const int alone, const int fresh, const int columns, const int all, long depth,
                     const real *const *a, const real *w, V *acc) {
  long k = 0;
  V sum[ROWS][8]; /* of their own: among all that a tile sums, the compiler would not keep them in registers */
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < columns; c++) sum[r][c] = fresh ? (V){} : acc[r * all + c];
  __asm__("" : "+r"(depth)); /* unrolled in full, loops over few terms are several times slower */
  if (rows == 1 && alone) { /* one sum waits for itself: four do not */
    V part[3][8] = {};
    for (; k + 4 <= depth; k += 4) { /* weights as they lie: beyond the first cache, memory is fetched in that order */
      const V *wk = (const V *)(w + k * columns * WIDE);
      UNROLL for (int c = 0; c < columns; c++) sum[0][c] += v_const(a[0][k]) * wk[c];
      UNROLL for (int i = 0; i < 3; i++)
        UNROLL for (int c = 0; c < columns; c++) part[i][c] += v_const(a[0][k + 1 + i]) * wk[(i + 1) * columns + c];
    }
    UNROLL for (int c = 0; c < columns; c++) sum[0][c] += (part[0][c] + part[1][c]) + part[2][c];
  }
  for (; k < depth; k++) {
    V wk[8];
    UNROLL for (int c = 0; c < columns; c++) {
      wk[c] = *(const V *)(w + (k * columns + c) * WIDE);
      HOLD(wk[c]);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      const V ar = v_const(a[r][k]);
      UNROLL for (int c = 0; c < columns; c++) sum[r][c] += ar * wk[c];
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < columns; c++) acc[r * all + c] = sum[r][c];
}
/* multiply_columns_all(rows, alone, fresh, depth, a, w, acc): of many rows a function of its own, whose registers hold the
 * pointers to all of them. */
#define PRODUCTS(columns, all) \
  ONCE void multiply_##columns##_##all##_most(const int fresh, long depth, const real *const *a, const real *w, V *acc) { \
    multiply(ROWS, 0, fresh, columns, all, depth, a, w, acc); \
  } \
  ONCE void multiply_##columns##_##all##_half(const int fresh, long depth, const real *const *a, const real *w, V *acc) { \
    multiply(ROWS / 2, 0, fresh, columns, all, depth, a, w, acc); \
  } \
  INLINE void multiply_##columns##_##all(const int rows, const int alone, const int fresh, long depth, \
                                         const real *const *a, const real *w, V *acc) { \
    if (rows == ROWS) multiply_##columns##_##all##_most(fresh, depth, a, w, acc); \
    else if (rows == ROWS / 2) multiply_##columns##_##all##_half(fresh, depth, a, w, acc); \
    else multiply(rows, alone, fresh, columns, all, depth, a, w, acc); \
  }
INLINE void clear_sums(const int rows, const int columns, const int all, V *acc) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) acc[r * all + c] = (V){};
}
/* The same for some of the columns that lie side by side in w. */
INLINE void multiply_some(const int rows, const int columns, const int all, long depth, const real *const *a,
                          const real *w, const int stride, V *acc) {
  clear_sums(rows, columns, all, acc);
  for (long k = 0; k < depth; k++)
    UNROLL for (int c = 0; c < columns; c++) {
      const V wk = *(const V *)(w + (k * stride + c) * WIDE);
      UNROLL for (int r = 0; r < rows; r++) acc[r * all + c] += v_const(a[r][k]) * wk;
    }
}
/* A block-diagonal matrix, for `units` units at a time: how many numbers of the vector they look at, at most, and from
 * where on. Blocks are `outputs` by `inputs`. */
INLINE long band_depth(long outputs, long inputs, long width, long units) {
  long most = 0;
  for (long unit = 0; unit < width; unit += units) {
    const long last = unit + units < width ? unit + units : width;
    const long depth = ((last - 1) / outputs + 1 - unit / outputs) * inputs;
    most = depth > most ? depth : most;
  }
  return most;
}
INLINE long band_begin(long outputs, long inputs, long whole, long depth, long unit) {
  const long begin = unit / outputs * inputs;
  return begin + depth > whole ? whole - depth : begin;
}
/* Where the units begin (or, behind all, end) that this thread computes. */
INLINE long share_of(const group *g, long tiles, int end) {
  return g->members == 1 ? end * tiles : tiles * (g->member + end) / g->members;
}
/* Blocks of `span` vectors of units, as far as they are this thread's: in every other step from the last one on, whose weights
 * are still in the first cache, where all together would push each other out of it. */
#define BLOCKS(width, span) (((width) + (span) * WIDE - 1) / ((span) * WIDE))
#define OWN_BLOCKS(j, width, span) \
  for (long first = share_of(g, BLOCKS(width, span), 0), end = share_of(g, BLOCKS(width, span), 1), at = first, j; \
       j = g->turned ? first + end - 1 - at : at, at < end; at++)
INLINE int leads(const group *g) { return g->member == 0; }
/* What others wrote before is there to be read behind it. */
INLINE void meet(group *g) {
  if (g->others) team_meet(g->others, g->member, g->members, ++g->met);
}
#if WIDE == 16 && defined(__AVX512F__)
INLINE real sum_lanes(V v) { return _mm512_reduce_add_ps((__m512)v); }
#else
INLINE real sum_lanes(V v) {
  for (int half = WIDE / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) v[lane] += v[lane + half];
  return v[0];
}
#endif
/* A sum over a row, of so many vectors: every thread adds up what all have left, in the order of the units. */
INLINE void add_total(group *g, int index, long vectors) {
  for (long r = 0; r < g->count; r++) {
    V sum = {};
    for (long v = 0; v < vectors; v++) sum += g->partial[(r * TOTALS + index) * SUMMED + v];
    g->totals[r * TOTALS + index] = sum_lanes(sum);
  }
}
/* Rows of the next tile, of `left` ones: as many as have room for their sums in registers, or half as many, or two: a row
 * by itself waits for its sums. */
INLINE int tile_rows(const int most, long left) {
  return left >= most ? most : most > 1 && left >= most / 2 ? most / 2 : most > 2 && left >= 2 ? 2 : 1;
}
/* The products of a tile's rows, then its pointwise part, for all rows of a group. */
#define TILES(most, all, name) \
  for (long r = 0, rows; r < g->count; r += rows) { \
    V acc[(most) * (all)]; \
    rows = tile_rows(most, g->count - r); \
    if (rows == (most)) name##_products(most, a, g, r, j, acc); \
    else if (rows == 1) name##_products(1, a, g, r, j, acc); \
    else if ((most) > 4 && rows == 2) name##_products(2, a, g, r, j, acc); \
    else name##_products((most) / 2, a, g, r, j, acc); \
    name##_rows((int)rows, a, g, decay, real_step, r, j, acc); \
  }
/* A group of one row: its sums stay in registers. */
#define SINGLE(all, name) \
  { \
    V acc[all]; \
    name##_products(1, a, g, 0, j, acc); \
    name##_rows(1, a, g, decay, real_step, 0, j, acc); \
  }
#endif
