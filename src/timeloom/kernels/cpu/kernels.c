/* Chunk sweeps of GRU, LSTM and RNN on a CPU, float32.
 *
 * A sweep runs a list of stretches. Stretch r is begin[r] <= t < end[r] of sequence seq[r]; it starts from its own
 * state, or finds it by entering `lead` steps early, and never looks at another one, so stretches are rows of one
 * batch. Rows are taken in groups that fit a core's cache; a group walks its steps together, and each step is, for
 * LANES hidden units at a time: products with the recurrent weights in registers, then the gates, then the new state.
 * Nothing but inputs and states touches memory. Where x is given instead of projected inputs, the projection too
 * happens on the way, and the adjoint delivers the gradients of x, of the weights and of the biases.
 *
 * Layouts (row-major): inputs (T, B, K) with K = gates * n; states (T + 1, B, n), states[t] being the state
 * *before* step t; weights packed in blocks of LANES units as [block][k][gate][LANES]. Hidden units are padded
 * with zeros to a multiple of LANES inside.
 *
 * Dropout inside the recurrence comes as masks behind each row of inputs or of x (see cells/masked.py).
 *
 * The readable twin is kernels/reference.py; the equations are in cells/.
 */
#include <omp.h>
#include "adjoint.h"
#include "forward.h"

int timeloom_lanes(void) { return LANES; }

static float largest_of(const float *values, long n) {
  float largest = 0.0f;
  for (long i = 0; i < n; i++) largest = fmaxf(largest, fabsf(values[i]));
  return largest < INFINITY ? largest : 0.0f;
}

#define LAST 4 /* links at the end that count as following each other: see solve/residual.py */

/* The largest jump between a stretch's end and the start of the next one along the chain, relative to the largest value
 * that its part of the state has there (or, where values fade, has had so far) and to `floor`, or that share of the
 * largest value that follows where this is below one. Rows: (links, batch), states of `parts` parts of n. */
float timeloom_jump(const float *starts, const float *ends, long links, long batch, long n, long parts, float floor,
                    int fading) {
  const long stride = batch * parts * n;
  float worst = 0.0f;
  for (long at = 0; at < stride; at += n) { /* a part of a sequence; h, the first, has a box, c has not */
    const float share = at / n % parts == 0 ? floor : 0.0f;
    float so_far = largest_of(starts + at, n), behind = links <= LAST ? so_far : 0.0f;
    for (long p = links > LAST ? links - LAST : 1; p < links; p++) {
      behind = fmaxf(behind, largest_of(starts + p * stride + at, n));
      behind = fmaxf(behind, largest_of(ends + (p - 1) * stride + at, n));
    }
    for (long k = 1; k < links; k++) {
      const long p = fading ? k : links - k;
      const float *end = ends + (p - 1) * stride + at, *start = starts + p * stride + at;
      float largest = 0.0f, jump = 0.0f;
      int finite = 1;
      for (long i = 0; i < n; i++) {
        const float gap = fabsf(end[i] - start[i]);
        largest = fmaxf(largest, fmaxf(fabsf(end[i]), fabsf(start[i])));
        jump = fmaxf(jump, gap);
        finite &= gap <= 3.4e38f;
      }
      if (!finite) return INFINITY;
      so_far = fading ? fmaxf(so_far, largest) : largest, behind = fmaxf(behind, largest);
      worst = fmaxf(worst, jump / fmaxf(fmaxf(so_far, share * fminf(behind, 1.0f)), 1.17549435e-38f));
    }
  }
  return worst;
}

typedef void walk(const sweep_args *, group *);

/* Runs all groups on all threads. Returns 0, or 1 where memory for a group's scratch could not be had. */
static int run(walk *walk_group, int tile, long blocks, long sums, const sweep_args *a, int threads) {
  const long padded = (a->n + LANES - 1) / LANES * LANES;
  long size = (a->rows + threads - 1) / threads;
  size = size > GROUP ? GROUP : size > tile ? (size + tile - 1) / tile * tile : size;
  const long groups = (a->rows + size - 1) / size;
  int failed = 0;
  /* static: which thread sums what must not depend on the day */
#pragma omp parallel for schedule(static, 1) num_threads(threads) reduction(| : failed) if (threads > 1 && groups > 1)
  for (long i = 0; i < groups; i++) {
    group g = {.first = i * size, .padded = padded};
    g.count = a->rows - g.first < size ? a->rows - g.first : size;
    for (long r = g.first; r < g.first + g.count; r++)
      if (a->end[r] - a->begin[r] > g.longest) g.longest = a->end[r] - a->begin[r];
    const long block = g.count * padded, slots = a->sums ? 1 + SUM_TOKENS / g.count : 1;
    float *scratch = NULL;
    const long shown = a->dropped ? 2 + slots : 0;
    if (posix_memalign((void **)&scratch, 64, sizeof(float) * block * (5 + blocks * slots + shown))) {
      failed |= 1;
      continue;
    }
    g.state[0] = scratch, g.state[1] = scratch + block, g.next[0] = scratch + 2 * block, g.next[1] = scratch + 3 * block;
    g.decay = scratch + 4 * block, g.pre = scratch + 5 * block;
    g.shown = g.pre + blocks * slots * block, g.mask = g.shown + block, g.seen = g.mask + block;
    memset(g.shown, 0, sizeof(float) * block * shown);
    g.sums = a->sums ? a->sums + sums * omp_get_thread_num() : NULL;
    walk_group(a, &g);
    free(scratch);
  }
  return failed;
}

/* `tile` is how many rows the registers hold beside the weights: TILE, and less where there are four sums to a row. */
#define EXPORT(name, cell, tile) \
  static void name##_forward(const sweep_args *a, group *g) { forward_group(cell, 0, tile, a, g); } \
  static void name##_fused(const sweep_args *a, group *g) { forward_group(cell, 1, GATES(cell) > 1 ? TILE / 2 : TILE, a, g); } \
  static void name##_adjoint(const sweep_args *a, group *g) { adjoint_group(cell, 0, a, g); } \
  static void name##_taped(const sweep_args *a, group *g) { adjoint_group(cell, 1, a, g); } \
  int timeloom_##name##_forward(const sweep_args *a, int threads) { \
    return run(a->x ? name##_fused : name##_forward, TILE, 1, 0, a, threads); \
  } \
  int timeloom_##name##_adjoint(const sweep_args *a, int threads) { \
    const long padded = (a->n + LANES - 1) / LANES * LANES; \
    return run(a->tape ? name##_taped : name##_adjoint, TILE, BLOCKS(cell), sums_size(cell, a, padded), a, threads); \
  }
EXPORT(gru, GRU, TILE)
EXPORT(lstm, LSTM, TILE / 2)
EXPORT(rnn_tanh, RNN_TANH, TILE)
EXPORT(rnn_relu, RNN_RELU, TILE)
