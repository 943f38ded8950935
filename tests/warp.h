// One warp of a CUDA kernel on a CPU: 32 lanes are 32 contexts that run in turns, each up to where it waits for the
// others. Stands in for functions.cuh too. Copies arrive when they are waited for, not before, so that a wait too few
// shows; lanes run last one first on every other turn, so that a missing barrier does.
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>
#undef INFINITY
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index { int x; };
static Index threadIdx, blockIdx, blockDim = {32};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

struct Copy { void *to; const void *from; int bytes; };
struct Lane {
  ucontext_t context;
  bool done;
  std::vector<char> stack;
  std::deque<std::vector<Copy>> groups;           // copies on their way, oldest group first
  std::vector<Copy> open;
  uint32_t slot;
};
static Lane lanes[32];
static ucontext_t turns;

using std::max;
using std::min;

static inline void __syncwarp() { swapcontext(&lanes[threadIdx.x].context, &turns); }
static inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
static inline uint32_t __float_as_uint(float x) { return bits_of(x); }
static inline float __uint_as_float(uint32_t u) { return float_of(u); }
static inline float __int_as_float(int i) { return float_of((uint32_t)i); }
static inline float __shfl_sync(uint32_t, float x, int from) {
  lanes[threadIdx.x].slot = bits_of(x);
  __syncwarp();
  const float found = float_of(lanes[from].slot);
  __syncwarp();
  return found;
}
static inline float __shfl_xor_sync(uint32_t all, float x, int other) { return __shfl_sync(all, x, threadIdx.x ^ other); }
static inline float __shfl_up_sync(uint32_t all, float x, int by) { return __shfl_sync(all, x, max(threadIdx.x - by, 0)); }
static inline float __shfl_down_sync(uint32_t all, float x, int by) { return __shfl_sync(all, x, min(threadIdx.x + by, 31)); }
static inline void __syncthreads() { __syncwarp(); }
static inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
  lanes[threadIdx.x].slot = x;
  __syncwarp();
  uint32_t most = 0;
  for (const Lane &lane : lanes) most = std::max(most, lane.slot);
  __syncwarp();
  return most;
}
static inline void atomicMax(uint32_t *at, uint32_t x) { *at = std::max(*at, x); }

static inline float reciprocal(float x) { return 1.0f / x; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
static inline float tanh_(float x) { return std::tanh(x); }
static inline void *address_of(const void *p) { return (void *)p; }
template <int BYTES> static inline void copy_ahead(void *to, const void *from) { lanes[threadIdx.x].open.push_back({to, from, BYTES}); }
static inline void copies_end() {
  Lane &lane = lanes[threadIdx.x];
  lane.groups.push_back(lane.open), lane.open.clear();
}
template <int LATER> static inline void wait_for_copies() {
  auto &groups = lanes[threadIdx.x].groups;
  for (; groups.size() > LATER; groups.pop_front())
    for (const Copy &copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
}

template <class Args> struct Launch {
  static void (*kernel)(const Args);
  static const Args *args;
  static void lane() {
    kernel(*args);
    lanes[threadIdx.x].done = true;
    setcontext(&turns);
  }
  static void run(void (*of)(const Args), int blocks, const Args *given) {
    kernel = of, args = given;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
      for (Lane &each : lanes) {
        each.stack.resize(1 << 18), each.done = false, each.groups.clear(), each.open.clear();
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.data(), each.context.uc_stack.ss_size = each.stack.size();
        makecontext(&each.context, lane, 0);
      }
      for (int turn = 0, left = 32; left; turn++) {
        left = 0;
        for (int k = 0; k < 32; k++) {
          threadIdx.x = turn % 2 ? 31 - k : k;
          if (lanes[threadIdx.x].done) continue;
          left++;
          swapcontext(&turns, &lanes[threadIdx.x].context);
        }
      }
    }
  }
};
template <class Args> void (*Launch<Args>::kernel)(const Args);
template <class Args> const Args *Launch<Args>::args;
