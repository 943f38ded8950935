/* Numbers below the smallest normal one, which some processors handle a hundred times as slowly as others. What fades
 * along a sequence passes through them on its way to zero, for a hundred steps each time: kernels take them for zero. */
#ifndef TIMELOOM_TINY_H
#define TIMELOOM_TINY_H
#include <stdint.h>

#if defined(__x86_64__)
static inline uint64_t float_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void set_float_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#define TINY_IS_ZERO 0x8040u /* what comes out, and what goes in */
#elif defined(__aarch64__)
static inline uint64_t float_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
static inline void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#define TINY_IS_ZERO (1u << 24)
#else
static inline uint64_t float_mode(void) { return 0; }
static inline void set_float_mode(uint64_t mode) { (void)mode; }
#define TINY_IS_ZERO 0
#endif

/* Of the thread that calls it, until it puts back the mode that is returned. */
static inline uint64_t take_tiny_for_zero(void) {
  const uint64_t before = float_mode();
  set_float_mode(before | TINY_IS_ZERO);
  return before;
}
#endif
