// Float32 numbers as two fp16 halves each, scaled by a power of two that they share.
//
// x scale = high + low, up to 2^-22 of it: three products of halves (low high + high low + high high) make a product of
// float32's accuracy. The scale takes the largest number of a group to 2^14 ... 2^15; beside it, others lose digits below
// 2^-38 of it. The tensor cores truncate as they add up, so their sums must be short; longer ones are added in float32.
#pragma once
#include "tensor_cores.cuh"

struct Pair { unsigned high, low; };              // two numbers
struct alignas(8) Quad { unsigned first, second; };   // four halves, in shared memory

__device__ __forceinline__ Pair split_pair(float first, float second) {
  float first_high, second_high;
  const unsigned high = to_halves(first, second);
  of_halves(high, first_high, second_high);
  return {high, to_halves(first - first_high, second - second_high)};
}
// The scale of numbers whose largest magnitude is `most`, and its inverse: both are normal numbers.
__device__ __forceinline__ int exponent_of_most(float most) { return max(__float_as_int(most) >> 23, 15); }
__device__ __forceinline__ float scale_of(float most) { return __int_as_float((268 - exponent_of_most(most)) << 23); }
__device__ __forceinline__ float undo_of(float most) { return __int_as_float((exponent_of_most(most) - 14) << 23); }
