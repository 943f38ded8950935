// The elementary functions of gates, and copies that run beside the arithmetic.
#pragma once

// ---- elementary functions: errors of about 2 ulp, NaN stays NaN --------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// A gate near one is rounded once, as 1 - e / (1 + e): 1 / (1 + e) would round 1 + e first, and what is left of
// 1 - gate, which gradients are made of, would be off by three times as much.
__device__ __forceinline__ float sigmoid(float x) {
  const float e = exp2_fast(-1.4426950408889634f * x), gate = reciprocal(1.0f + e);
  return x > 1.0f ? fmaf(-e, gate, 1.0f) : gate;
}
// An odd series below 0.55, where the quotient would cancel; the quotient above: of |x|, since that of a negative x is a
// difference of numbers near 1 and 2, and what is left of 1 - tanh^2 would be off by four times as much.
__device__ __forceinline__ float tanh_(float x) {
  float quotient = copysignf(1.0f - 2.0f * reciprocal(exp2_fast(2.8853900817779268f * fabsf(x)) + 1.0f), x);
  float s = x * x, p = -6.272792019e-03f;
  p = fmaf(p, s, 2.107039870e-02f);
  p = fmaf(p, s, -5.385190566e-02f);
  p = fmaf(p, s, 1.333258083e-01f);
  p = fmaf(p, s, -3.333331732e-01f);
  return s < 0.3025f ? fmaf(x * s, p, x) : quotient;
}

// ---- copies from global to shared memory that run beside the arithmetic -----------------------------------------

__device__ __forceinline__ unsigned address_of(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }
template <int BYTES> __device__ __forceinline__ void copy_ahead(unsigned to, const void *from) {
  if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
  else if (BYTES == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;"); }
template <int LATER> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER));
}
