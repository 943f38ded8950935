// Products of float32 accuracy on the tensor cores.
//
// An operand x is split into two halves of fp16, x = hi + lo / SHIFT, and a product is the sum of three:
// hi hi + (hi lo + lo hi) / SHIFT, added in float32. What is left out is 2^-22 of it.
#pragma once
typedef unsigned short half_bits;

#define SHIFT 2048.0f
#define ROWS 8   // rows of a block: the columns of one product
#define TILE 16  // units of a warp: the rows of one product

#if HALF == 2
#define NARROW "bf16"
#else
#define NARROW "f16"
#endif

// c (16 x 8) += a (16 x 16) b (16 x 8). Lane (g = lane / 4, t = lane % 4) holds rows g, g + 8 of a and c; columns
// 2 t, 2 t + 1 of c; column g of b; and of the 16 terms those numbered 4 t ... 4 t + 3 (any order is right if a and b
// agree on it, and this one makes them neighbours in memory).
__device__ __forceinline__ void multiply(float *c, const unsigned *a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." NARROW "." NARROW ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ half_bits to_half(float x) {
  half_bits r;
  asm("cvt.rn." NARROW ".f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float of_half(half_bits x) {
#if HALF == 2
  return __uint_as_float((unsigned)x << 16);
#else
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
#endif
}
__device__ __forceinline__ unsigned pair(half_bits a, half_bits b) { return (unsigned)a | ((unsigned)b << 16); }
__device__ __forceinline__ void split(float x, half_bits &hi, half_bits &lo) {
  hi = to_half(x);
  lo = to_half((x - of_half(hi)) * SHIFT);
}
