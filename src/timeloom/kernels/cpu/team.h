/* Threads that share the units of a row: a step is a product that all of them make a part of, and then they meet.
 *
 * They wait for each other awake, since a step takes a microsecond. Where a core is taken away from one of them, by other
 * programs or other threads, all would wait for it at every step: what the first one has waited is measured, and a
 * team that costs more than it saves is given up. Who computes a unit does not change what is computed. */
#ifndef TIMELOOM_TEAM_H
#define TIMELOOM_TEAM_H
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#ifndef AWAKE
#define AWAKE 4096 /* looks at the others before a core is offered to them */
#define GRACE 4e6  /* nanoseconds of waiting for cores that are busy: threads of the call before are, for a while */
#endif
#define SHARE 8 /* beyond them, the share of the time that may be waited */

typedef struct {
  _Alignas(64) atomic_long arrived; /* meetings that members have come to, of all but the first together */
  _Alignas(64) atomic_long begun;   /* meetings that are over */
  _Alignas(64) atomic_int given_up;
  double since, waited;             /* the first member's */
  void *shared;                     /* what the first one has laid out for all, or NULL */
} team;

static double team_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e9 + now.tv_nsec;
}
static void team_pause(long looks) {
  if (looks > AWAKE) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
  else __builtin_ia32_pause();
#endif
}
/* The first member's word, before the first meeting. */
static void team_begin(team *t, void *shared) { t->shared = shared, t->since = team_clock(); }
/* The `meeting`th meeting of members: nobody leaves it before all have come. */
static void team_meet(team *t, long member, long members, long meeting) {
  long looks = 0;
  if (member) {
    atomic_fetch_add_explicit(&t->arrived, 1, memory_order_acq_rel);
    while (atomic_load_explicit(&t->begun, memory_order_acquire) < meeting) team_pause(++looks);
    return;
  }
  const long all = (members - 1) * meeting;
  double from = 0;
  while (atomic_load_explicit(&t->arrived, memory_order_acquire) < all) {
    if (++looks == AWAKE) from = team_clock();
    team_pause(looks);
  }
  if (from) {
    const double now = team_clock();
    t->waited += now - from;
    if (t->waited > GRACE + (now - t->since) / SHARE) atomic_store_explicit(&t->given_up, 1, memory_order_relaxed);
  }
  atomic_store_explicit(&t->begun, meeting, memory_order_release);
}
#endif
