/* Between two sweeps: how far apart the stretches are. The definition is solve/residual.py's. */
#include "vectors.h"

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
