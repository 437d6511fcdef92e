// A device in front of the mailbox, without the interpreter: asks n times, waits for each answer, and notes the seconds.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void ask(_Atomic int64_t *asked, _Atomic int64_t *answered, int64_t first, int n, double gap, double *seconds) {
  for (int i = 0; i < n; i++) {
    for (double until = now() + gap; now() < until;) continue;
    const double begin = now();
    atomic_store_explicit(asked, first + i, memory_order_release);
    while (atomic_load_explicit(answered, memory_order_acquire) != first + i && now() - begin < 1) continue;
    seconds[i] = now() - begin;
  }
}
