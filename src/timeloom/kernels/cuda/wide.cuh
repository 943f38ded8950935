// What the sweeps of wide layers share: a launch is a step of all rows, between two products of the library.
//
// A block has one row. It writes what the next product is taken of, the *operand*: split into two halves of fp16 beside
// each other (MODE 0: hi, lo, hi, against weights W_lo, W_hi, W_hi: float32 accuracy, see products.cuh), in half precision
// as the weights are (MODE 1 fp16, 2 bf16), or as it is (MODE 3). A split row is scaled by a power of two, so that its
// largest value is near 2^12: what is left out is then 2^-22 of a product, whatever the row's size.
#pragma once
#define HALF (MODE == 2 ? 2 : 0)
#include "products.cuh"
#include "cell.cuh"
#define LOCAL ((UNITS + THREADS - 1) / THREADS)   // units of a thread
#define COPIES (MODE == 0 ? 3 : 1)                // vectors that an operand is stored as
#define EACH_UNIT _Pragma("unroll") for (int k = 0, unit = threadIdx.x; k < LOCAL; k++, unit += THREADS) if (unit < UNITS)

__device__ __forceinline__ float over_block(float most) {
  __shared__ float of_warp[32];
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
  __syncthreads();                                // an earlier call may still be read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
  __syncthreads();
  most = of_warp[0];
  for (int warp = 1; warp < THREADS / 32; warp++) most = fmaxf(most, of_warp[warp]);
  return most;
}

// What a row of numbers is multiplied by before it is split, and what undoes it: powers of two; NaN and infinity pass.
__device__ __forceinline__ void scale_of(float most, float &scale, float &inverse) {
  int exponent = (int)(__float_as_uint(most) >> 23 & 255) - 127;
  exponent = exponent > 90 ? 90 : exponent < -90 ? -90 : exponent;
  scale = __uint_as_float((unsigned)(127 + 12 - exponent) << 23);
  inverse = __uint_as_float((unsigned)(127 - 12 + exponent) << 23);
}

// Number i of WIDTH, of one row's operand.
template <int WIDTH> __device__ __forceinline__ void put_operand(void *row, int i, float x, float scale) {
  if (MODE == 3) {
    ((float *)row)[i] = x;
  } else if (MODE > 0) {
    ((half_bits *)row)[i] = to_half(x);
  } else {
    half_bits *const to = (half_bits *)row;
    const half_bits hi = to_half(x * scale);
    to[i] = to[2 * WIDTH + i] = hi, to[WIDTH + i] = to_half(x * scale - of_half(hi));
  }
}
