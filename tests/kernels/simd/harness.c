// Drives the kernels, the pool and the mailbox without Python, so that sanitizers see all of it. Prints what went wrong.
//
// `compute` is this file's: layer.c has it under another name, so that a tile can be made to take long, or for ever.
#define _GNU_SOURCE
#include "pool.h"
#include "layer.h"
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void computed(Work *work, int phase, int tile);  // layer.c's
static _Atomic int hang, hung, slow;             // the next tile of a pool's thread never ends; it has begun; microseconds
static _Atomic int busy;                         // as slow, in a thread's own time
static _Thread_local int calls, quick;           // this thread waits for the others; it is a hundred times as fast

static void work_for(int microseconds) {
  struct timespec begin, now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
  do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  while ((now.tv_sec - begin.tv_sec) * 1000000 + (now.tv_nsec - begin.tv_nsec) / 1000 < microseconds);
}

void compute(Work *work, int phase, int tile) {
  if (atomic_load(&slow)) usleep((useconds_t)atomic_load(&slow));
  if (atomic_load(&busy)) work_for(atomic_load(&busy) / (quick ? 100 : 1));
  if (!calls && atomic_exchange(&hang, 0)) {
    atomic_store(&hung, 1);
    for (;;) pause();
  }
  computed(work, phase, tile);
}

static int wrong;
#define CHECK(what, ...) \
  if (!(what)) { wrong++, printf("line %d: " #what " ", __LINE__), printf(__VA_ARGS__), printf("\n"); }

static uint64_t state = 1;
static uint32_t draw(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33);
}

static uint16_t brain(float value) {
  uint32_t word;
  value = round_to(BF16, value);
  memcpy(&word, &value, 4);
  return (uint16_t)(word >> 16);
}

// A tensor of `experts` parts, each an allocation of its own of exactly the bytes that it must have.
static Table table(int experts, size_t bytes, int kind) {
  uint64_t *at = malloc((size_t)experts * sizeof *at);
  for (int e = 0; e < experts; e++) {
    uint8_t *part = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) part[i] = (uint8_t)draw();
    for (size_t i = 0; kind == 'b' && i < bytes / 2; i++) ((uint16_t *)part)[i] = brain((float)(draw() % 200) / 100 - 1);
    for (size_t i = 0; kind == 'f' && i < bytes / 4; i++) ((float *)part)[i] = (float)(draw() % 100) / 5000;
    for (size_t i = 0; kind == 'f' && bytes == 2 && i < 1; i++) part[i] = 0;
    at[e] = (uint64_t)(uintptr_t)part;
  }
  return (Table){at, bytes};
}

static void free_table(Table t, int experts) {
  for (int e = 0; t.at && e < experts; e++) free((void *)(uintptr_t)t.at[e]);
  free((void *)(uintptr_t)t.at);
}

static size_t scale_bytes(const Spec *s, int rows, int columns) {
  const int groups = s->group ? (columns + s->group - 1) / s->group : 1, per = s->codes == E2M1 ? 4 : s->codes == INT4 && !s->zeros ? 2 : 1;
  return 4 * (size_t)((s->codes == E2M1 && s->group == 16) + (groups + per - 1) / per) * (size_t)(((rows + s->rows - 1) / s->rows + 3) / 4 * 4);
}

static Layer layer_of(const Spec *s, int biases) {
  const size_t rows[2] = {2 * (size_t)s->intermediate, (size_t)s->hidden}, columns[2] = {(size_t)s->hidden, (size_t)s->intermediate};
  Table codes[2], scales[2] = {{NULL, 0}, {NULL, 0}}, bias[2] = {{NULL, 0}, {NULL, 0}};
  for (int i = 0; i < 2; i++) {
    const size_t n = rows[i] * columns[i];
    codes[i] = s->codes == F32 ? table(s->experts, 4 * n, 'f') : s->codes == BF16 ? table(s->experts, 2 * n, 'b') : table(s->experts, s->codes < INT4 ? n : n / 2, 'c');
    if (s->codes > BF16) scales[i] = table(s->experts, scale_bytes(s, (int)rows[i], (int)columns[i]), s->codes == E2M1 ? 'c' : s->codes == INT4 ? 'b' : 'f');
    if (biases) bias[i] = table(s->experts, rows[i] * (s->dtype == F32 ? 4 : 2), s->dtype == F32 ? 'f' : 'b');
  }
  for (int e = 0; s->zeros && e < s->experts; e++)  // points that are exact in bfloat16
    for (int i = 0; i < 2; i++)
      for (size_t w = 0; w < scales[i].bytes / 4; w++) ((uint16_t *)(uintptr_t)scales[i].at[e])[2 * w + 1] = (uint16_t)(draw() % (draw() % 2 ? 17 : 250));
  for (int e = 0; s->codes == E2M1 && e < s->experts; e++)  // exponents that keep sums small
    for (int i = 0; i < 2; i++)
      for (size_t b = 0; b < scales[i].bytes; b++) ((uint8_t *)(uintptr_t)scales[i].at[e])[b] = s->group == 32 ? 118 + draw() % 8 : 0x30 + draw() % 8;
  return (Layer){codes[0], codes[1], scales[0], scales[1], bias[0], bias[1]};
}

static void free_layer(Layer *l, int experts) {
  free_table(l->w13, experts), free_table(l->w2, experts), free_table(l->s13, experts), free_table(l->s2, experts);
  free_table(l->b13, experts), free_table(l->b2, experts);
}

static const int32_t CPUS[8] = {0, 1, 0, 1, 0, 1, 0, 1};

static void *rows_of(const Spec *s, int rows) {
  const size_t n = (size_t)rows * (size_t)s->hidden;
  void *x = malloc(n * 4 + 4);
  for (size_t i = 0; i < n; i++) {
    const float value = (float)(draw() % 2000) / 1000 - 1;
    if (s->dtype == F32) ((float *)x)[i] = value;
    else ((uint16_t *)x)[i] = brain(value);
  }
  return x;
}

static const Spec SPECS[] = {
      {F32, 0, 1, 0, -1, F32, SILU, 40, 24, 5},     {BF16, 0, 1, 0, -1, BF16, SWIGLUOAI, 72, 56, 5}, {BF16, 0, 1, 0, -1, BF16, SILU, 1056, 40, 5}, {E4M3, 128, 128, 0, 128, BF16, SILU, 1152, 40, 5},  {INT8, 0, 1, 0, -1, BF16, GELU, 66, 34, 5},
      {INT8, 64, 1, 0, -1, BF16, SILU, 144, 80, 5}, {E4M3, 0, 1, 0, -1, BF16, SILU, 100, 44, 5},      {E4M3, 128, 128, 0, 128, BF16, SILU, 200, 150, 5},
      {E4M3, 0, 1, 0, 0, BF16, GELU_TANH, 90, 30, 5}, {INT4, 128, 1, 0, -1, BF16, SILU, 272, 144, 5}, {INT4, 32, 1, 1, -1, BF16, SILU, 160, 96, 5},
      {INT4, 128, 1, 1, -1, BF16, SILU, 272, 144, 5},
      {INT4, 16, 1, 0, -1, BF16, SILU, 160, 96, 5}, {INT4, 16, 1, 1, -1, BF16, SILU, 160, 96, 5}, {INT4, 0, 1, 0, -1, BF16, SILU, 130, 62, 5},  {INT4, 48, 1, 0, -1, BF16, SILU, 96, 96, 5},      {E2M1, 32, 1, 0, -1, BF16, SWIGLUOAI, 160, 96, 5},
      {E2M1, 16, 1, 0, -1, BF16, SILU, 208, 48, 5}};

// Every instruction set and number of threads gives what plain C in one thread does.
static void formats(void) {
  for (size_t f = 0; f < sizeof SPECS / sizeof *SPECS; f++) {
    const Spec *s = &SPECS[f];
    Layer layer = layer_of(s, f % 2);
    const int counts[] = {0, 1, 2, 3, 4, 7, 33};
    for (int c = 0; c < 7; c++) {
      const int rows = counts[c], top_k = 3;
      void *x = rows_of(s, rows);
      int32_t *ids = malloc((size_t)rows * 3 * 4 + 4);
      float *weights = malloc((size_t)rows * 3 * 4 + 4);
      for (int i = 0; i < rows * 3; i++) ids[i] = (int)(draw() % 6) - 1, weights[i] = draw() % 4 ? (float)(draw() % 100) / 100 : 0;
      const size_t n = (size_t)rows * (size_t)s->hidden;
      float *want = malloc(n * 4 + 4), *got = malloc(n * 4 + 4), most = 1e-6f;
      for (int isa = PLAIN; isa < ISAS; isa++) {
        if (!spac_isa(isa)) continue;
        for (int threads = 1; threads <= 4; threads += 3) {
          Pool *pool = spac_pool(threads, CPUS, isa, 60);
          float *out = isa == PLAIN && threads == 1 ? want : got;
          for (size_t i = 0; i < n; i++) out[i] = NAN;
          const Request request = {s, &layer, x, weights, ids, rows, top_k, out};
          const int refusal = spac_run(pool, &request);
          CHECK(refusal == DONE, "format %zu isa %d: %d", f, isa, refusal)
          for (size_t i = 0; i < n; i++) most = fmaxf(most, fabsf(want[i]));
          // with rows in e4m3 another order of sums may move a value of h to the next of 8 in its octave
          const float allowed = s->activations >= 0 ? .05f : s->dtype == F32 ? 1e-5f : .03f;
          for (size_t i = 0; i < n; i++)
            if (!(fabsf(got[i] - want[i]) <= allowed * most) && out == got) {
              CHECK(0, "format %zu isa %d threads %d rows %d: %g, not %g", f, isa, threads, rows, (double)got[i], (double)want[i])
              break;
            }
          spac_close_pool(pool);
        }
      }
      free(x), free(ids), free(weights), free(want), free(got);
    }
    free_layer(&layer, s->experts);
  }
}

// Each product of a matrix is plain C's but for the order of sums: closer than what rounds of whole experts let see.
static void products(void) {
  for (size_t f = 0; f < sizeof SPECS / sizeof *SPECS; f++) {
    const Spec *s = &SPECS[f];
    Layer layer = layer_of(s, 0);
    const int32_t ids[9] = {0}, outputs = 2 * s->intermediate;
    const float weights[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    void *x = rows_of(s, 9);
    if (s->codes == E2M1 && s->group == 32) ((uint8_t *)(uintptr_t)layer.s13.at[0])[4 * 3 + 1] = 255;  // NaN in row 3
    const Request request = {s, &layer, x, weights, ids, 9, 1, NULL};
    float *want = NULL, most = 0;
    for (int isa = PLAIN; isa < ISAS; isa++) {
      if (!spac_isa(isa)) continue;
      Work work = {.bytes = 0};
      CHECK(prepare(&work, &request, isa, 1) == DONE, "format %zu", f)
      float *y = calloc(9 * (size_t)outputs, 4), *py[9];
      const float *px[9];
      Matrix w = work.w13;
      w.codes = (const uint8_t *)(uintptr_t)layer.w13.at[0];
      w.scales = s->codes > BF16 ? (const void *)(uintptr_t)layer.s13.at[0] : NULL;
      for (int row = 0; row < 9; row++) computed(&work, 0, row), px[row] = work.x + (size_t)row * work.wide, py[row] = y + row * outputs;
      for (int m = want ? 1 : 9; m <= 9; m++) {
        for (int i = 0; i < 9 * outputs; i++) y[i] = -1;
        work.first.product(&w, 0, outputs, px + 9 - m, m, py + 9 - m);
        for (int i = 0; !want && i < 9 * outputs; i++) most = isnan(y[i]) ? most : fmaxf(most, fabsf(y[i]));
        for (int i = 0; want && i < 9 * outputs; i++) {
          const float right = i < (9 - m) * outputs ? -1 : want[i];
          if (isnan(right) == isnan(y[i]) && !(fabsf(y[i] - right) > 1e-4f * most)) continue;
          CHECK(0, "format %zu isa %d rows %d: %g, not %g, at %d", f, isa, m, (double)y[i], (double)right, i)
          break;
        }
      }
      if (want) free(y);
      else want = y;
      free(work.memory);
    }
    free(want), free(x), free_layer(&layer, s->experts);
  }
}

static void refusals(void) {
  const Spec s = {BF16, 0, 1, 0, -1, BF16, SILU, 32, 16, 4};
  Layer layer = layer_of(&s, 0), other = layer;
  Pool *pool = spac_pool(2, CPUS, PLAIN, 60);
  void *x = rows_of(&s, 1);
  int32_t ids[2] = {0, 3};
  float weights[2] = {1, 1}, out[32];
  Request request = {&s, &layer, x, weights, ids, 1, 2, out};
  CHECK(spac_run(pool, &request) == DONE, "a right one")
  ids[1] = 4;
  CHECK(spac_run(pool, &request) == NO_EXPERT, "an expert out of range")
  ids[1] = 3, other.w2.bytes--, request.layer = &other;
  CHECK(spac_run(pool, &request) == NO_MEMORY, "a tensor too small")
  other = layer, other.b13 = (Table){layer.w13.at, 63};
  CHECK(spac_run(pool, &request) == NO_MEMORY, "a bias too small")
  uint64_t missing[4] = {layer.w13.at[0], 0, 0, 0};
  other = layer, other.w13.at = missing;
  CHECK(spac_run(pool, &request) == NO_MEMORY, "an expert without memory")
  request.layer = &layer;
  for (size_t field = 0; field < sizeof(Spec) / 4; field++) {
    const int32_t values[] = {-2, 1 << 30};
    for (int v = 0; v < 2; v++) {
      Spec bad = s;
      ((int32_t *)&bad)[field] = values[v];
      request.spec = &bad;
      const int refusal = spac_run(pool, &request);
      CHECK(refusal || field == 1 || field == 2 || field == 3 || field == 9, "field %zu = %d", field, values[v])
    }
  }
  CHECK(spac_run(NULL, &request) == NO_POOL, "none")
  CHECK(!spac_pool(0, CPUS, PLAIN, 1) && !spac_pool(1, CPUS, ISAS, 1), "no pool")
  spac_close_pool(pool);
  free(x), free_layer(&layer, s.experts);
}

static int answered(Mail *mail, int64_t number, double seconds) {
  for (int i = 0; i < seconds * 1e5; i++) {
    if (atomic_load_explicit((_Atomic int64_t *)mail->answered, memory_order_acquire) == number) return 1;
    usleep(10);
  }
  return 0;
}

static void ask(Mail *mail, int64_t number, int layer, int rows, const int32_t *ids, const void *x) {
  for (int i = 0; i < rows * mail->top_k; i++) {
    atomic_store_explicit((_Atomic int32_t *)mail->ids + i, ids[i], memory_order_relaxed);
    const float one = 1;
    uint32_t word;
    memcpy(&word, &one, 4);
    atomic_store_explicit((_Atomic uint32_t *)mail->weights + i, word, memory_order_relaxed);
  }
  for (int i = 0; i < rows * 16; i++) atomic_store_explicit((_Atomic uint32_t *)mail->x + i, ((const uint32_t *)x)[i], memory_order_relaxed);
  atomic_store_explicit((_Atomic int32_t *)mail->head, layer, memory_order_relaxed);
  atomic_store_explicit((_Atomic int32_t *)mail->head + 1, rows, memory_order_relaxed);
  atomic_store_explicit((_Atomic int64_t *)mail->asked, number, memory_order_release);
}

static void mailbox(void) {
  const Spec s = {BF16, 0, 1, 0, -1, BF16, SILU, 32, 16, 4};
  Layer layers[2] = {layer_of(&s, 0), layer_of(&s, 1)};
  int64_t asked = 0, done = 0;
  int32_t head[2] = {0, 0}, ids[8] = {0}, chosen[8] = {0, 1, 2, 3, -1, 0, 3, -1};
  float weights[8] = {0}, results[4 * 32] = {0}, want[2][4 * 32], ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  void *x = rows_of(&s, 4), *rows = calloc(4 * 32, 4);
  Mail mail = {&asked, &done, head, ids, weights, rows, results, 4, 2};
  Pool *pool = spac_pool(3, CPUS, PLAIN, 60);
  for (int l = 0; l < 2; l++) {
    const Request request = {&s, &layers[l], x, ones, chosen, 4, 2, want[l]};
    CHECK(spac_run(pool, &request) == DONE, "layer %d", l)
  }
  Mailbox *box = spac_mailbox(pool, &mail, &s, layers, 2, 0);
  for (int64_t number = 1; number <= 200; number++) {
    const int layer = number % 2, count = 1 + (int)(number % 4);
    if (number % 50 == 0) usleep(600000);  // it sleeps
    if (number % 3 == 0) spac_wake(box);
    ask(&mail, number, layer, count, chosen, x);
    CHECK(answered(&mail, number, 20), "request %d", (int)number)
    for (int i = 0; i < count * 32; i++) {
      uint32_t word = atomic_load_explicit((_Atomic uint32_t *)results + i, memory_order_relaxed);
      if (memcmp(&word, &want[layer][i], 4)) { CHECK(0, "request %d: another result at %d", (int)number, i) break; }
    }
  }
  CHECK(spac_answers(box) == 200 && !spac_refused(box), "%d answers", (int)spac_answers(box))
  atomic_store(&slow, 20000);  // the device does not wait: the next request replaces one that is being computed
  ask(&mail, 201, 0, 4, chosen, x);
  usleep(30000);
  ask(&mail, 202, 1, 4, chosen, x);
  CHECK(answered(&mail, 202, 20), "the later one")
  atomic_store(&slow, 0);
  CHECK(spac_answers(box) == 201, "the replaced one was not answered, but %d", (int)spac_answers(box))
  chosen[0] = 4;
  ask(&mail, 203, 0, 1, chosen, x);
  for (int i = 0; i < 2000 && !spac_refused(box); i++) usleep(10000);
  CHECK(spac_refused(box) == NO_EXPERT, "an expert out of range: %d", spac_refused(box))
  spac_close_mailbox(box);
  ask(&mail, 204, 2, 1, chosen, x);  // before: a new box answers the last request again
  box = spac_mailbox(pool, &mail, &s, layers, 2, 0);
  for (int i = 0; i < 2000 && !spac_refused(box); i++) usleep(10000);
  CHECK(spac_refused(box) == NO_SPEC && done == 202, "a layer out of range: %d", spac_refused(box))
  spac_close_mailbox(box);
  spac_close_pool(pool);
  free_layer(&layers[0], 4), free_layer(&layers[1], 4), free(x), free(rows);
}

static void stuck(void) {
  const Spec s = {BF16, 0, 1, 0, -1, BF16, SILU, 64, 512, 4};
  Layer layer = layer_of(&s, 0);
  Pool *pool = spac_pool(3, CPUS, PLAIN, .2);
  void *x = rows_of(&s, 1);
  const int32_t ids[2] = {0, 3};
  const float weights[2] = {1, 1};
  float out[64] = {0};
  const Request request = {&s, &layer, x, weights, ids, 1, 2, out};
  CHECK(spac_run(pool, &request) == DONE && out[0] != 0, "before")
  calls = 1;
  atomic_store(&slow, 200), atomic_store(&hang, 1);
  int refusal = DONE;
  for (int attempt = 0; attempt < 1000 && !atomic_load(&hung); attempt++) refusal = spac_run(pool, &request);
  CHECK(atomic_load(&hung) && refusal == STUCK, "a thread that never ends its tile: %d", refusal)
  CHECK(spac_run(pool, &request) == STUCK, "it is not used any more")
  int64_t asked = 0, done = 0;
  int32_t head[2] = {0, 0}, none[2] = {-1, -1};
  float results[64];
  Mail mail = {&asked, &done, head, none, (float *)results, results, results, 1, 2};
  Mailbox *box = spac_mailbox(pool, &mail, &s, &layer, 1, 0);
  atomic_store_explicit((_Atomic int64_t *)&asked, 1, memory_order_release);
  for (int i = 0; i < 2000 && !spac_refused(box); i++) usleep(10000);
  CHECK(spac_refused(box) == STUCK && !done, "nor by a mailbox")
  spac_close_mailbox(box);
  spac_close_pool(pool);  // which does not wait for it
  fflush(stdout);
  _exit(wrong ? 1 : 0);  // the thread has the memory
}

// A process that is stopped for longer than its threads have patience goes on: none of them is stuck.
static void paused(void) {
  const Spec s = {BF16, 0, 1, 0, -1, BF16, SILU, 64, 64, 4};
  Layer layer = layer_of(&s, 0);
  Pool *pool = spac_pool(3, CPUS, PLAIN, 1);
  void *x = rows_of(&s, 1);
  const int32_t ids[2] = {0, 3};
  const float weights[2] = {1, 1};
  float out[64] = {0};
  const Request request = {&s, &layer, x, weights, ids, 1, 2, out};
  const pid_t parent = getpid(), child = fork();
  if (!child) {
    for (int i = 0; i < 3; i++) {
      usleep(200000);
      kill(parent, SIGSTOP);
      usleep(1300000);
      kill(parent, SIGCONT);
    }
    _exit(0);
  }
  quick = 1;
  atomic_store(&busy, 20000);
  int ended = 0, refusal = DONE;
  while (!ended && refusal == DONE) refusal = spac_run(pool, &request), ended = waitpid(child, NULL, WNOHANG);
  CHECK(refusal == DONE && ended == child, "it went on: %d", refusal)
  atomic_store(&busy, 0);
  CHECK(spac_run(pool, &request) == DONE, "after it")
  spac_close_pool(pool);
  free(x), free_layer(&layer, 4);
}

static void *read_bytes(size_t bytes) {
  void *memory = malloc(bytes + 1);
  if (fread(memory, 1, bytes, stdin) != bytes) exit(2);
  return memory;
}

// Computes a request of standard input, and writes its output: what a Python of another processor compares.
static void twin(void) {
  int32_t *head = read_bytes(4 * 4), isa = head[0], threads = head[1], rows = head[2], top_k = head[3];
  const Spec *s = read_bytes(sizeof *s);
  const uint64_t *bytes = read_bytes(6 * sizeof *bytes);
  Table tables[6];
  for (int t = 0; t < 6; t++) {
    tables[t] = (Table){bytes[t] ? malloc((size_t)s->experts * 8) : NULL, bytes[t]};
    for (int e = 0; bytes[t] && e < s->experts; e++) ((uint64_t *)(uintptr_t)tables[t].at)[e] = (uint64_t)(uintptr_t)read_bytes(bytes[t]);
  }
  const Layer layer = {tables[0], tables[1], tables[2], tables[3], tables[4], tables[5]};
  const size_t pairs = (size_t)rows * (size_t)top_k, values = (size_t)rows * (size_t)s->hidden;
  const void *x = read_bytes(values * (s->dtype == F32 ? 4 : 2));
  const float *weights = read_bytes(pairs * 4);
  const int32_t *ids = read_bytes(pairs * 4);
  float *out = malloc(values * 4 + 1);
  Pool *pool = spac_pool(threads, CPUS, isa, 60);
  const int refusal = pool ? spac_run(pool, &(Request){s, &layer, x, weights, ids, rows, top_k, out}) : NO_ISA;
  CHECK(refusal == DONE, "%d", refusal)
  if (!wrong) fwrite(out, 4, values, stdout);
  spac_close_pool(pool);
}

int main(int count, char **arguments) {
  const char part = count > 1 ? arguments[1][0] : 'f';
  if (part == 'f') formats();
  if (part == 'e') products();
  if (part == 'r') refusals();
  if (part == 'm') mailbox();
  if (part == 's') stuck();
  if (part == 'p') paused();
  if (part == 't') twin();
  if (part == 'k') {  // a fork has no threads, and is told
    Pool *pool = spac_pool(2, CPUS, PLAIN, 60);
    const Spec s = {BF16, 0, 1, 0, -1, BF16, SILU, 32, 16, 4};
    Layer layer = layer_of(&s, 0);
    const Request request = {&s, &layer, NULL, NULL, NULL, 0, 1, NULL};
    CHECK(spac_run(pool, &request) == DONE, "no rows")
    if (!fork()) {
      CHECK(spac_run(pool, &request) == NO_POOL, "in a fork")
      spac_close_pool(pool);
      _exit(wrong);
    }
    int status = 1;
    wait(&status);
    CHECK(status == 0, "the fork: %d", status)
    spac_close_pool(pool);
    free_layer(&layer, 4);
  }
  return wrong ? 1 : 0;
}
