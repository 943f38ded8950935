// Products of fp16 matrices in shared memory on the tensor cores, and the numbers that are split for them. On a CPU,
// tests/cuda_emulator/tensor_cores.cuh stands in for this file.
#pragma once
typedef unsigned short half_bits;

// c (16 x 8) += a (16 x 16) b (16 x 8). Lane (g = lane / 4, t = lane % 4) holds rows g, g + 8 and columns 2 t, 2 t + 1 of c.
__device__ __forceinline__ void multiply_halves(float *c, const unsigned *a, const unsigned *b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four matrices of 8 x 8 halves: lane i gives the address of row i % 8 of matrix i / 8, and gets, of every matrix, the
// halves (i / 4, 2 (i % 4)) and (i / 4, 2 (i % 4) + 1), or, turned, those of the transposed matrix.
__device__ __forceinline__ void load_halves(unsigned *to, const half_bits *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
__device__ __forceinline__ void load_halves_turned(unsigned *to, const half_bits *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
}
// Two numbers as halves, the first one in the low bits; and back.
__device__ __forceinline__ unsigned to_halves(float first, float second) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
__device__ __forceinline__ void of_halves(unsigned both, float &first, float &second) {
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(first), "=f"(second) : "r"(both));
}
