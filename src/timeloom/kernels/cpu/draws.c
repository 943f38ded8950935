/* Zeros and ones by chance: what zoneout draws for every unit and step. The readable twin is nn/draws.py. */
#include <stdint.h>

/* The number at a place of splitmix64's sequence (Steele, Lea and Flood, 2014), found without those before it. */
static inline uint64_t at_place(uint64_t seed, uint64_t place) {
  uint64_t z = seed + (place + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* out[i] is 1 with probability below / 2^32: number k decides on i = 2k by its lower half, on i = 2k + 1 by its upper. */
void timeloom_draw(uint64_t seed, uint64_t below, int64_t count, float *out) {
  for (int64_t k = 0; k < count / 2; k++) {
    const uint64_t number = at_place(seed, (uint64_t)k);
    out[2 * k] = (number & 0xffffffffu) < below ? 1.0f : 0.0f;
    out[2 * k + 1] = (number >> 32) < below ? 1.0f : 0.0f;
  }
  if (count % 2) out[count - 1] = (at_place(seed, (uint64_t)(count / 2)) & 0xffffffffu) < below ? 1.0f : 0.0f;
}
