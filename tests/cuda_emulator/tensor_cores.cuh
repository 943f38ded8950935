// Stands in for kernels/cuda/tensor_cores.cuh where the kernels run on a CPU: see emulator.h.
#pragma once
typedef unsigned short half_bits;

inline float of_half(half_bits bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return (float)x;
}
inline half_bits to_half(float x) {
  const _Float16 rounded = (_Float16)x;
  half_bits bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}
inline unsigned to_halves(float first, float second) { return to_half(first) | (unsigned)to_half(second) << 16; }
inline void of_halves(unsigned both, float &first, float &second) {
  first = of_half((half_bits)both), second = of_half((half_bits)(both >> 16));
}
inline const half_bits *row_of(const half_bits *own, int lane) {
  if ((uintptr_t)own % 16) emulated::fail("a row of halves that is not aligned");
  return __shfl_sync(0xffffffffu, own, lane);
}
inline void load_halves(unsigned *to, const half_bits *row) {
  for (int matrix = 0; matrix < 4; matrix++) {
    const half_bits *const own = row_of(row, 8 * matrix + own_lane() / 4) + 2 * (own_lane() % 4);
    to[matrix] = own[0] | (unsigned)own[1] << 16;
  }
}
inline void load_halves_turned(unsigned *to, const half_bits *row) {
  for (int matrix = 0; matrix < 4; matrix++) {
    half_bits both[2];
    for (int i = 0; i < 2; i++) both[i] = row_of(row, 8 * matrix + 2 * (own_lane() % 4) + i)[own_lane() / 4];
    to[matrix] = both[0] | (unsigned)both[1] << 16;
  }
}
inline void multiply_halves(float *c, const unsigned *a, const unsigned *b) {
  static float given[1024][6][2];                 // of every thread: four pairs of a, two of b
  const int first = emulated::running / 32 * 32, g = own_lane() / 4, t = own_lane() % 4;
  for (int i = 0; i < 6; i++) {
    float *const pair = given[emulated::running][i];
    of_halves(i < 4 ? a[i] : b[i - 4], pair[0], pair[1]);
  }
  emulated::wait(&emulated::Fiber::at_warp, first, first + 32);
  for (int e = 0; e < 4; e++) {
    double sum = c[e];
    for (int k = 0; k < 16; k += 2) {             // two terms, which a lane of each row and column holds
      const float *const x = given[first + 4 * g + k % 8 / 2][e / 2 + 2 * (k / 8)];
      const float *const y = given[first + 4 * (2 * t + e % 2) + k % 8 / 2][4 + k / 8];
      sum += (double)x[0] * y[0] + (double)x[1] * y[1];
    }
    c[e] = (float)sum;
  }
  emulated::wait(&emulated::Fiber::at_warp, first, first + 32);
}
