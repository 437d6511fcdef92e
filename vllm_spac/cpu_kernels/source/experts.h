// What a layer's experts are, and a request to compute some of them. Shared by the kernels, the pool and Python (`_library.py`).
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum Codes { F32, F16, BF16, INT8, E4M3, INT4, E2M1, CODES };
enum Activation { SILU, GELU, GELU_TANH, SWIGLUOAI, SILU_CLAMPED, SWIGLUOAI_HALVES, ACTIVATIONS };  // as `kernels/formats.py`
enum Isa { PLAIN, AVX2, AVX512, AVX512_BF16, NEON, ISAS };
enum Refusal {
  DONE,
  NO_SPEC,      // a number of the specification is out of range
  NO_MEMORY,    // an address is missing, or the memory behind it is too small
  NO_EXPERT,    // an id is not of the layer
  NO_ROOM,      // scratch memory could not be allocated
  NO_ISA,       // the processor lacks the instruction set
  NO_POOL,      // the pool was made by another process, or is closed
  STUCK,        // a thread of the pool did not finish in time; it is not used any more
};

// As `kernels/formats.py`; sizes in elements.
typedef struct {
  int32_t codes, group, rows, zeros;
  int32_t activations;  // columns of x and h that are rounded to e4m3 with one scale; 0: all, -1: they are not
  int32_t dtype;        // of x and biases, and what h is rounded to: F32, F16 or BF16
  int32_t activation;
  int32_t hidden, intermediate, experts;
} Spec;

// A tensor of all experts of a layer: the address of each one's part, and the bytes behind it.
typedef struct {
  const uint64_t *at;
  uint64_t bytes;
} Table;

typedef struct {
  Table w13, w2, s13, s2, b13, b2;  // scales without packed weights, and biases, may be missing: at == NULL
} Layer;

typedef struct {
  const Spec *spec;
  const Layer *layer;
  const void *x;         // [rows, hidden] of dtype
  const float *weights;  // [rows, top_k]; a pair of weight 0 does not count
  const int32_t *ids;    // [rows, top_k]; below 0: not a pair
  int32_t rows, top_k;
  float *out;  // [rows, hidden]
} Request;

typedef struct {
  const uint8_t *codes;
  const void *scales;
  int32_t rows, columns, across;  // across: words of a row of scales
  const Spec *spec;
} Matrix;

// y[m][n - n0] = sum over k of x[m][k] W[n][k], for n0 <= n < n1; x in the planes that `planes_of` gives.
typedef void Product(const Matrix *w, int n0, int n1, const float *const *x, int m, float *const *y);

typedef struct {
  Product *product;
  int bits;   // log2 of planes: a block of planes * lanes columns is stored plane by plane, column i * planes + j at [j][i]
  int lanes;
  // x is bfloat16, with bytes of codes interleaved: log2 of the codes of a byte in bits, 64 bytes in lanes (0: as it is).
  // Where rows are rounded to e4m3 it is their codes, and the scales of groups are behind the padded columns, in float32.
  int half;
} Kernel;

enum { PAD = 128 };  // rows of x are padded to blocks of so many columns
static inline size_t padded_of(int columns) { return ((size_t)columns + PAD - 1) / PAD * PAD; }

// Returns the kernel of W [rows, columns] by an instruction set; a plain one for scales that it cannot apply.
Kernel kernel_of(const Spec *spec, int isa);
int has_isa(int isa);
float round_to(int dtype, float value);
float round_to_e4m3(float value);  // |value| <= 448

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline float brain_of(uint16_t bits) { return float_of((uint32_t)bits << 16); }

static inline float half_of(uint16_t bits) {
  const uint32_t word = (uint32_t)(bits & 0x7FFF) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
  const float size = float_of(word) * 0x1p112f;  // also of subnormals
  uint32_t result;
  memcpy(&result, &size, 4);
  return float_of((word >= 31u << 23 ? word | 0xFFu << 23 : result) | sign);
}
