// Runs CUDA kernels on a CPU, for tests: the threads of a block are fibers, which are switched at barriers and shuffles.
//
// Copies beside the arithmetic happen as late as they may or, `early`, at once; fibers run in order or, `early`, in
// reverse. What depends on that, or leaves a barrier out, gives other numbers.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <deque>
#include <functional>
#include <vector>

namespace emulated {
struct Copy { void *to; const void *from; int bytes; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::deque<std::vector<Copy>> copies;
  long at_block = 0, at_warp = 0;                 // barriers passed or waited at
  bool done = false;
};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int running, block;
inline bool early;
inline const char *failure;
inline std::function<void()> kernel;

inline Fiber &current() { return fibers[running]; }
inline void yield() { swapcontext(&current().context, &scheduler); }
inline void fail(const char *why) { if (!failure) failure = why; }
inline void wait(long Fiber::*count, int from, int to) {
  const long mine = ++(current().*count);
  for (;;) {
    bool all = true;
    for (int i = from; i < to; i++) all &= fibers[i].*count >= mine;
    if (all || failure) return;
    yield();
  }
}
inline void entry() {
  kernel();
  current().done = true;
  yield();
}
inline const char *run(int blocks, int threads, bool in_reverse, const std::function<void()> &body) {
  early = in_reverse, failure = nullptr, kernel = body;
  for (block = 0; block < blocks && !failure; block++) {
    fibers.assign(threads, {});
    for (auto &fiber : fibers) {
      fiber.stack.resize(128 << 10);
      fiber.copies.emplace_back();
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, entry, 0);
    }
    for (bool any = true; any;) {
      any = false;
      bool moved = false;
      for (int i = 0; i < threads; i++) {
        running = early ? threads - 1 - i : i;
        if (current().done) continue;
        any = true;
        const long before = current().at_block + current().at_warp;
        swapcontext(&scheduler, &current().context);
        moved |= current().done || current().at_block + current().at_warp != before;
      }
      if (any && !moved && !failure) {            // one more round: the last to arrive may have been behind the others
        static int rounds;
        if (++rounds > 4) fail("threads wait for one another at different barriers"), rounds = 0;
      }
    }
  }
  return failure;
}
struct Index { unsigned x; };
inline Index thread() { return {(unsigned)running}; }
inline Index which() { return {(unsigned)block}; }
}

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
#define threadIdx (emulated::thread())
#define blockIdx (emulated::which())
#define blockDim (emulated::Index{(unsigned)emulated::fibers.size()})
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
inline void __syncthreads() { emulated::wait(&emulated::Fiber::at_block, 0, (int)emulated::fibers.size()); }
inline void meet_in_cluster() { __syncthreads(); }   // blocks run in order: the last one finds the others done
template <class T> T __shfl_sync(unsigned, T x, int lane) {
  static T exchanged[1024];
  const int own = emulated::running, first = own / 32 * 32;
  exchanged[own] = x;
  emulated::wait(&emulated::Fiber::at_warp, first, first + 32);
  const T y = exchanged[first + lane];
  emulated::wait(&emulated::Fiber::at_warp, first, first + 32);
  return y;
}
inline int own_lane() { return emulated::running % 32; }
template <class T> T __shfl_xor_sync(unsigned all, T x, int lanes) { return __shfl_sync(all, x, own_lane() ^ lanes); }
template <class T> T __shfl_up_sync(unsigned all, T x, int by) {
  return __shfl_sync(all, x, own_lane() < by ? own_lane() : own_lane() - by);
}
template <class T> T __shfl_down_sync(unsigned all, T x, int by) {
  return __shfl_sync(all, x, own_lane() + by > 31 ? own_lane() : own_lane() + by);
}
inline float __int_as_float(int bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline int __float_as_int(float x) {
  int bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <class T> T __ldg(const T *p) { return *p; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
