/* Sums over steps of what adjoint steps write: gradients of matrices and of per-unit vectors. A few steps' worth waits in
 * cache until it is summed; each such short sum is made by itself first: rounding is then that of short sums and of a sum
 * of sums, not that of one long sum. */
#ifndef TIMELOOM_FUSED_SUMS_H
#define TIMELOOM_FUSED_SUMS_H
#include "fused.h"

/* out[i][:] += sum_k values[k][i] grads[k][:] for `rows` values of i and `vecs` vectors of grads, of which the last has
 * `lanes` numbers. */
INLINE void outer_tile(const int rows, const int vecs, const waiting *w, const real *const *values, long i, long column,
                     long lanes, real *out, long stride) {
  V acc[6][4];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < vecs; v++) acc[r][v] = (V){};
  for (long k = 0; k < w->count; k++) {
    const real *value = values[k] + i, *grad = w->written[k] + column;
    V gk[4];
    UNROLL for (int v = 0; v < vecs; v++) {
      gk[v] = *(const V *)(grad + v * WIDE);
      HOLD(gk[v]);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      const V value_r = v_const(value[r]);
      UNROLL for (int v = 0; v < vecs; v++) acc[r][v] += value_r * gk[v];
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int v = 0; v < vecs; v++) {
      real *to = out + (i + r) * stride + v * WIDE;
      const long some = v < vecs - 1 ? WIDE : lanes;
      store_units(to, load_units(to, some) + acc[r][v], some);
    }
}
#if WIDE == 16
#define SUM_ROWS 6
#else
#define SUM_ROWS 3
#endif
/* Few rows left would wait for their own sums: eight are better two times four than six and two. */
INLINE int sum_rows(long left) {
  return left >= SUM_ROWS && (SUM_ROWS < 6 || left != 8) ? SUM_ROWS : SUM_ROWS > 4 && left >= 4 ? 4 : left >= 2 ? 2 : 1;
}
/* The same for all i < depth, as far as they are this thread's, and for `width` columns of what was written. Returns where
 * the next sum lies. */
static real *outer_sum(const group *g, const waiting *w, const real *const *values, long offset, long depth, long column, long width,
                      real *out) {
  const long first = share_of(g, depth, 0), last = share_of(g, depth, 1);
  for (long at = 0; at < width;) {
    const long left = width - at;
    const int vecs = left > 2 * WIDE ? (left > 3 * WIDE ? 4 : 3) : left > WIDE ? 2 : 1;
    const long lanes = left < vecs * WIDE ? left - (vecs - 1) * WIDE : WIDE;
#define OUTER_TILE(rows, vecs) \
  outer_tile(rows, vecs, w, values, offset + i, column + at, lanes, out + at - offset * width, width)
#define OUTER_TILES(vecs) \
  for (long i = first, rows; i < last; i += rows) { \
    rows = sum_rows(last - i); \
    if (rows == SUM_ROWS) OUTER_TILE(SUM_ROWS, vecs); \
    else if (rows == 4) OUTER_TILE(4, vecs); \
    else if (rows == 2) OUTER_TILE(2, vecs); \
    else OUTER_TILE(1, vecs); \
  }
    if (vecs == 4) { OUTER_TILES(4) } else if (vecs == 3) { OUTER_TILES(3) } else if (vecs == 2) { OUTER_TILES(2) } else { OUTER_TILES(1) }
#undef OUTER_TILES
#undef OUTER_TILE
    at += vecs * WIDE;
  }
  return out + depth * width;
}
/* Of the columns alone. */
static real *column_sum(const group *g, const waiting *w, long column, long width, real *out) {
  for (long at = 0; leads(g) && at < width; at += WIDE) {
    V sum = {};
    for (long k = 0; k < w->count; k++) sum += *(const V *)(w->written[k] + column + at);
    store_units(out + at, load_units(out + at, width - at) + sum, width - at);
  }
  return out + width;
}
#endif
