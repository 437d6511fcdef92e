// A request as phases of independent tiles; `pool.c` hands them out.
#pragma once
#include "experts.h"

enum { PHASES = 4 };

typedef struct {
  Spec spec;  // copies: a thread that was given up may still read them
  Layer layer;
  Request request;
  Kernel first, second;
  Matrix w13, w2;  // without an expert's addresses
  int tile, tiles[PHASES];
  int experts, pairs;      // selected ones
  size_t wide, narrow;     // padded columns of x and h
  int *of_expert, *begins;  // [experts], [experts + 1]: its pairs
  int *row;                 // [pairs]
  float *weight, *x, *h, *total;  // [pairs], [rows, wide], [pairs, narrow], [rows, hidden]
  void *memory;
  size_t bytes;
} Work;

// Checks a request, and sorts its pairs by expert. Memory is kept from one request to the next.
int prepare(Work *work, const Request *request, int isa, int threads);
void compute(Work *work, int phase, int tile);
