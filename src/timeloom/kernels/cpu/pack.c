/* Weights as generated loops read them, and their gradients as torch has them. The readable twins are in pack.py. */
#include <string.h>

#define LINE 16 /* numbers that are moved together in both directions: a line of the cache */

typedef struct {
  long count, outputs, inputs; /* the stack: (count, outputs, inputs) */
  long units;                  /* units of a block: those of several vectors side by side */
  long transposed, turned;     /* matrix i of what is packed is matrix i - turned of the stack */
} shape;

static long source_of(const shape *s, long i) { return (i + s->count - s->turned) % s->count; }

/* [block][input][matrix][unit], the units being outputs, or, transposed, [block][matrix][output][unit], the units being
 * inputs; units are padded with zeros. */
#define PACK(name, number) \
  void name(const number *stack, number *to, const shape *s) { \
    const long width = s->transposed ? s->inputs : s->outputs, units = s->units; \
    for (long first = 0; first < width; first += units) \
      for (long i = 0; i < s->count; i++) { \
        const number *from = stack + source_of(s, i) * s->outputs * s->inputs; \
        const long some = width - first < units ? width - first : units, block = first / units * s->count; \
        if (s->transposed) { \
          for (long k = 0; k < s->outputs; k++) { \
            number *at = to + ((block + i) * s->outputs + k) * units; \
            memcpy(at, from + k * s->inputs + first, sizeof(number) * some); \
            memset(at + some, 0, sizeof(number) * (units - some)); \
          } \
          continue; \
        } \
        for (long k0 = 0; k0 < s->inputs; k0 += LINE) { \
          const long last = k0 + LINE < s->inputs ? k0 + LINE : s->inputs; \
          number *at = to + (block * s->inputs + i) * units; \
          for (long u = 0; u < units; u++) \
            for (long k = k0; k < last; k++) \
              at[k * s->count * units + u] = u < some ? from[(first + u) * s->inputs + k] : 0; \
        } \
      } \
  }
PACK(timeloom_pack_4, float)
PACK(timeloom_pack_8, double)

/* From sums (inputs, count, outputs) of each of some threads, `apart` numbers between them, to the stack. */
void timeloom_unpack(const float *sums, float *stack, const shape *s, long threads, long apart) {
  for (long i = 0; i < s->count; i++) {
    float *to = stack + source_of(s, i) * s->outputs * s->inputs;
    for (long k0 = 0; k0 < s->inputs; k0 += LINE) {
      const long last = k0 + LINE < s->inputs ? k0 + LINE : s->inputs;
      for (long u = 0; u < s->outputs; u++)
        for (long k = k0; k < last; k++) {
          const float *from = sums + (k * s->count + i) * s->outputs + u;
          float sum = from[0];
          for (long thread = 1; thread < threads; thread++) sum += from[thread * apart];
          to[u * s->inputs + k] = sum;
        }
    }
  }
}
