// Threads that compute requests, and the host's end of the mailbox through which a device makes them.
#pragma once
#include "experts.h"

typedef struct Pool Pool;
typedef struct Mailbox Mailbox;

// Memory shared with a device; `kernels/mailbox.py` has the protocol.
typedef struct {
  int64_t *asked, *answered;
  int32_t *head, *ids;  // head: layer, rows
  float *weights;
  void *x;
  float *results;
  int32_t rows, top_k;  // the most rows of a request
} Mail;

// Returns a pool of so many threads, the caller of `spac_run` among them; the others are pinned to cpus[1], cpus[2] ...
// NULL: no memory, or no thread could be started.
Pool *spac_pool(int threads, const int32_t *cpus, int isa, double patience);
int spac_run(Pool *pool, const Request *request);  // one caller at a time; returns a Refusal
void spac_close_pool(Pool *pool);
int spac_isa(int isa);

// Answers requests in a thread of its own, which is pinned to `cpu`; the pool serves nobody else meanwhile.
Mailbox *spac_mailbox(Pool *pool, const Mail *mail, const Spec *spec, const Layer *layers, int count, int cpu);
void spac_wake(Mailbox *box);
int spac_refused(Mailbox *box);  // why it serves no more; DONE while it does
int64_t spac_answers(Mailbox *box);
void spac_close_mailbox(Mailbox *box);
