// Threads that compute one request after another, without the interpreter, and the mailbox that brings them requests.
#define _GNU_SOURCE
#include "pool.h"
#include "layer.h"
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPINS = 64, SPIN = 50000, LAYERS_SPIN = 300000, NAP = 4000, AWAKE = 500000000, REST = 1000000, LOOK = 10000000 };  // looks at once; nanoseconds

struct Pool {
  int threads, isa;
  pid_t owner;
  int64_t patience;
  _Atomic uint64_t next;      // generation << 40 | phase << 32 | tile
  _Atomic uint32_t tickets;   // a futex: requests so far
  _Atomic int32_t sleeping, finished, closing, stuck;
  _Atomic int32_t tiles[PHASES + 1];
  Work work;
  pthread_t *handles;
  int started;
};

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void breathe(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

static void pin(int cpu) {  // a processor that this process may not use any more is no error: the thread stays where it may be
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET((size_t)cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void sleep_on(_Atomic uint32_t *word, uint32_t value, int64_t nanoseconds) {
  struct timespec t = {nanoseconds / 1000000000, nanoseconds % 1000000000};
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nanoseconds ? &t : NULL, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0); }

// Starts a thread that gets no signals: those are for the thread that Python handles them in.
static int start_thread(pthread_t *handle, void *(*run)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int failed = pthread_create(handle, NULL, run, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return failed;
}

// -- the pool ----------------------------------------------------------------------------------------------------

// Takes and computes tiles until there is none to take; returns what `next` was then.
static uint64_t take(Pool *pool) {
  uint64_t next = atomic_load_explicit(&pool->next, memory_order_acquire);
  for (;;) {
    const int phase = (int)(next >> 32 & 255), tile = (int)(uint32_t)next;
    if (tile >= atomic_load_explicit(&pool->tiles[phase], memory_order_relaxed)) return next;
    // The number has the generation in it: a tile that is taken is one of the request that is in the pool.
    if (!atomic_compare_exchange_weak_explicit(&pool->next, &next, next + 1, memory_order_acq_rel, memory_order_acquire)) continue;
    compute(&pool->work, phase, tile);
    atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
    next = atomic_load_explicit(&pool->next, memory_order_acquire);
  }
}

typedef struct {
  Pool *pool;
  int cpu;
} Start;

static void *work_on(void *argument) {
  const Start start = *(Start *)argument;
  Pool *pool = start.pool;
  free(argument);
  pin(start.cpu);
  prctl(PR_SET_NAME, "spac-experts", 0, 0, 0);
  for (;;) {
    const uint32_t ticket = atomic_load(&pool->tickets);  // before what is looked at: what comes later changes it
    if (atomic_load(&pool->closing)) return NULL;
    const uint64_t seen = take(pool);
    for (int64_t until = now() + SPIN; now() < until && atomic_load_explicit(&pool->next, memory_order_relaxed) == seen;)
      for (int i = 0; i < SPINS && atomic_load_explicit(&pool->next, memory_order_relaxed) == seen; i++) breathe();
    if (atomic_load(&pool->next) != seen || (seen >> 32 & 255) != PHASES) continue;
    atomic_fetch_add(&pool->sleeping, 1);
    sleep_on(&pool->tickets, ticket, 0);  // unless it has changed
    atomic_fetch_sub(&pool->sleeping, 1);
  }
}

Pool *spac_pool(int threads, const int32_t *cpus, int isa, double patience) {
  Pool *pool = threads < 1 || !has_isa(isa) ? NULL : aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
  if (!pool) return NULL;
  memset(pool, 0, sizeof *pool);
  pool->threads = threads, pool->isa = isa, pool->owner = getpid(), pool->patience = (int64_t)(patience * 1e9);
  atomic_store(&pool->next, (uint64_t)PHASES << 32);
  pool->handles = calloc((size_t)threads, sizeof *pool->handles);
  for (int i = 1; pool->handles && i < threads; i++) {
    Start *start = malloc(sizeof *start);
    if (start) *start = (Start){pool, cpus[i]};
    if (!start || start_thread(&pool->handles[i], work_on, start)) {
      free(start);
      break;
    }
    pool->started = i;
  }
  if (pool->handles && pool->started == threads - 1) return pool;
  spac_close_pool(pool);
  return NULL;
}

// Waits for tiles that others compute. What passes while this thread does not run either is nobody's fault: a process that
// was stopped goes on.
static int finish(Pool *pool, int tiles) {
  int64_t last = now(), waited = 0;
  for (int spins = 0; atomic_load_explicit(&pool->finished, memory_order_acquire) < tiles; spins++) {
    if (spins < 16 * SPINS) {
      breathe();
      continue;
    }
    sched_yield();
    const int64_t time = now();
    waited += time - last < LOOK ? time - last : LOOK;
    last = time;
    if (waited > pool->patience) return 0;
  }
  return 1;
}

int spac_run(Pool *pool, const Request *request) {
  if (!pool || pool->owner != getpid() || atomic_load(&pool->closing)) return NO_POOL;
  if (atomic_load(&pool->stuck)) return STUCK;
  const int refusal = prepare(&pool->work, request, pool->isa, pool->threads);
  if (refusal) return refusal;
  const uint64_t generation = (atomic_load_explicit(&pool->next, memory_order_relaxed) >> 40) + 1;
  for (int phase = 0; phase <= PHASES; phase++) {
    const int tiles = phase < PHASES ? pool->work.tiles[phase] : 0;
    atomic_store_explicit(&pool->tiles[phase], tiles, memory_order_relaxed);
    if (phase < PHASES && !tiles) continue;
    atomic_store_explicit(&pool->finished, 0, memory_order_relaxed);
    atomic_store(&pool->next, generation << 40 | (uint64_t)phase << 32);
    if (phase == 0) {
      atomic_fetch_add(&pool->tickets, 1);
      if (atomic_load(&pool->sleeping)) wake_all(&pool->tickets);
    }
    take(pool);
    if (!finish(pool, tiles)) {
      atomic_store(&pool->stuck, 1);
      return STUCK;
    }
  }
  const size_t values = (size_t)request->rows * (size_t)request->spec->hidden;
  if (values) memcpy(request->out, pool->work.total, values * sizeof(float));
  return DONE;
}

void spac_close_pool(Pool *pool) {
  if (!pool || pool->owner != getpid()) return;  // a fork has no threads, and its memory is the parent's
  atomic_store(&pool->closing, 1);
  atomic_store(&pool->next, ((atomic_load(&pool->next) >> 40) + 1) << 40 | (uint64_t)PHASES << 32);
  atomic_fetch_add(&pool->tickets, 1);
  wake_all(&pool->tickets);
  const int stuck = atomic_load(&pool->stuck);
  for (int i = 1; i <= pool->started; i++) stuck ? pthread_detach(pool->handles[i]) : pthread_join(pool->handles[i], NULL);
  if (stuck) return;  // a thread may still write to the pool's memory: it is never freed
  free(pool->handles);
  free(pool->work.memory);
  free(pool);
}

int spac_isa(int isa) { return has_isa(isa); }

// -- the mailbox -------------------------------------------------------------------------------------------------

struct Mailbox {
  Pool *pool;
  Mail mail;
  Spec spec;
  Layer *layers;
  int count, cpu;
  pthread_t handle;
  _Atomic uint32_t wakes;  // a futex
  _Atomic int32_t closing, refused;
  _Atomic int64_t answers;
  int32_t *ids;
  float *weights, *results;
  uint64_t *x;
};

static int64_t asked(const Mailbox *box) { return atomic_load_explicit((_Atomic int64_t *)box->mail.asked, memory_order_acquire); }

// The device may write the next request meanwhile: each word is read at once, before `asked` is again, which says so.
static void copy_words(void *to, const void *from, size_t bytes) {
  for (size_t i = 0; i < bytes / 4; i++) ((uint32_t *)to)[i] = atomic_load_explicit((_Atomic uint32_t *)from + i, memory_order_acquire);
  if (bytes & 2) ((uint16_t *)to)[bytes / 2 - 1] = atomic_load_explicit((_Atomic uint16_t *)from + bytes / 2 - 1, memory_order_acquire);
}

static int answer(Mailbox *box, int64_t number) {
  const Mail *mail = &box->mail;
  int32_t head[2];
  copy_words(head, mail->head, sizeof head);
  const int layer = head[0], rows = head[1];
  if (layer < 0 || layer >= box->count || rows < 0 || rows > mail->rows) return asked(box) == number ? NO_SPEC : DONE;
  const size_t pairs = (size_t)rows * (size_t)mail->top_k, d = (size_t)box->spec.hidden, size = box->spec.dtype == F32 ? 4 : 2;
  copy_words(box->ids, mail->ids, pairs * 4);
  copy_words(box->weights, mail->weights, pairs * 4);
  copy_words(box->x, mail->x, (size_t)rows * d * size);
  if (asked(box) != number) return DONE;
  const Request request = {&box->spec, &box->layers[layer], box->x, box->weights, box->ids, rows, mail->top_k, box->results};
  const int refusal = spac_run(box->pool, &request);
  if (refusal || asked(box) != number) return refusal;
  for (size_t i = 0; i < (size_t)rows * d; i++) {
    uint32_t word;
    memcpy(&word, box->results + i, 4);
    atomic_store_explicit((_Atomic uint32_t *)mail->results + i, word, memory_order_relaxed);
  }
  atomic_store_explicit((_Atomic int64_t *)mail->answered, number, memory_order_release);
  atomic_fetch_add(&box->answers, 1);
  return DONE;
}

static void *serve(void *argument) {
  Mailbox *box = argument;
  int64_t last = 0, active = now();
  uint32_t wakes = 0;
  pin(box->cpu);
  prctl(PR_SET_NAME, "spac-mailbox", 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);  // else a nap of 4 microseconds takes 55
  while (!atomic_load_explicit(&box->closing, memory_order_acquire)) {
    const int64_t number = asked(box);
    if (number != last) {
      last = number;
      const int refusal = answer(box, number);
      if (refusal) {
        atomic_store(&box->refused, refusal);
        return NULL;
      }
      active = now();
      continue;
    }
    const uint32_t woken = atomic_load(&box->wakes);
    if (woken != wakes) wakes = woken, active = now();
    const int64_t idle = now() - active;
    if (idle < LAYERS_SPIN) {  // longer than from one layer's request to the next
      for (int i = 0; i < SPINS && asked(box) == last; i++) breathe();
    } else if (idle < AWAKE) {
      nanosleep(&(struct timespec){0, NAP}, NULL);
    } else {
      sleep_on(&box->wakes, wakes, REST);
    }
  }
  return NULL;
}

Mailbox *spac_mailbox(Pool *pool, const Mail *mail, const Spec *spec, const Layer *layers, int count, int cpu) {
  Mailbox *box = count < 1 ? NULL : calloc(1, sizeof *box);
  if (!box) return NULL;
  *box = (Mailbox){.pool = pool, .mail = *mail, .spec = *spec, .count = count, .cpu = cpu};
  const size_t pairs = (size_t)mail->rows * (size_t)mail->top_k, values = (size_t)mail->rows * (size_t)spec->hidden;
  box->layers = malloc((size_t)count * sizeof *layers);
  box->ids = malloc(pairs * 4), box->weights = malloc(pairs * 4), box->x = malloc(values * 4 + 8), box->results = malloc(values * 4);
  if (box->layers && box->ids && box->weights && box->x && box->results) {
    memcpy(box->layers, layers, (size_t)count * sizeof *layers);
    if (!start_thread(&box->handle, serve, box)) return box;
  }
  free(box->layers), free(box->ids), free(box->weights), free(box->x), free(box->results), free(box);
  return NULL;
}

void spac_wake(Mailbox *box) {
  atomic_fetch_add(&box->wakes, 1);
  wake_all(&box->wakes);
}

int spac_refused(Mailbox *box) { return atomic_load(&box->refused); }

int64_t spac_answers(Mailbox *box) { return atomic_load(&box->answers); }

void spac_close_mailbox(Mailbox *box) {
  if (!box || box->pool->owner != getpid()) return;
  atomic_store(&box->closing, 1);
  spac_wake(box);
  pthread_join(box->handle, NULL);
  if (atomic_load(&box->refused) == STUCK) return;  // the thread may still read its rows
  free(box->layers), free(box->ids), free(box->weights), free(box->x), free(box->results), free(box);
}
