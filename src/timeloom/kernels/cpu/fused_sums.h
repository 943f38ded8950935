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
/* The same for all i < depth and for `width` columns of what was written. */
static void outer_sum(const waiting *w, const real *const *values, long offset, long depth, long column, long width,
                      real *out) {
  for (long at = 0; at < width;) {
    const long left = width - at;
    const int vecs = left > 2 * WIDE ? (left > 3 * WIDE ? 4 : 3) : left > WIDE ? 2 : 1;
    const long lanes = left < vecs * WIDE ? left - (vecs - 1) * WIDE : WIDE;
    long i = 0;
#define OUTER_TILES(vecs) \
  for (; i + SUM_ROWS <= depth; i += SUM_ROWS) \
    outer_tile(SUM_ROWS, vecs, w, values, offset + i, column + at, lanes, out + at - offset * width, width); \
  for (; i + 2 <= depth; i += 2) \
    outer_tile(2, vecs, w, values, offset + i, column + at, lanes, out + at - offset * width, width); \
  for (; i < depth; i++) outer_tile(1, vecs, w, values, offset + i, column + at, lanes, out + at - offset * width, width);
    if (vecs == 4) { OUTER_TILES(4) } else if (vecs == 3) { OUTER_TILES(3) } else if (vecs == 2) { OUTER_TILES(2) } else { OUTER_TILES(1) }
#undef OUTER_TILES
    at += vecs * WIDE;
  }
}
/* Of the columns alone. */
static void column_sum(const waiting *w, long column, long width, real *out) {
  for (long at = 0; at < width; at += WIDE) {
    V sum = {};
    for (long k = 0; k < w->count; k++) sum += *(const V *)(w->written[k] + column + at);
    store_units(out + at, load_units(out + at, width - at) + sum, width - at);
  }
}
#endif
