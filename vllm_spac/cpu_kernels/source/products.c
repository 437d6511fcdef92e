// Which kernel multiplies by a matrix: by format, scales and instruction set; and a plain one for all of them.
#include "experts.h"
#include <math.h>
#include <string.h>
#define INLINE static inline __attribute__((always_inline))

static float e4m3_of(uint8_t code) {  // no NaN, as the kernels: 0x7F is 480
  return half_of((uint16_t)((code & 0x80) << 8 | (code & 0x7F) << 7)) * 256;
}

// To nearest, ties to even: `bits` of the mantissa go, of numbers below `normal` what adding `shifter` drops.
static float rounded(float value, int bits, float normal, float shifter) {
  const float size = fabsf(value);
  if (size < normal) return copysignf(size + shifter - shifter, value);
  uint32_t word, half = 1u << (bits - 1);
  memcpy(&word, &value, 4);
  word = (word + half - 1 + (word >> bits & 1)) & ~(2 * half - 1);
  memcpy(&value, &word, 4);
  return value;
}

float round_to(int dtype, float value) {
  if (dtype == F32 || value != value) return value;
  if (dtype == BF16) return rounded(value, 16, 0, 0);
  value = rounded(value, 13, 0x1p-14f, 0.75f);
  return fabsf(value) > 65504 ? copysignf(INFINITY, value) : value;
}

float round_to_e4m3(float value) { return rounded(value, 20, 0x1p-6f, 0x1.8p14f); }

// Rows of x in blocks of 4, 2 or 1; a block of 4 that has 3 repeats its last row.
#define PRODUCT(name, body, what)                                                                              \
  FN static void name(const Matrix *w, int n0, int n1, const float *const *x, int m, float *const *y) {    \
    for (; m > 0; m -= 4, x += 4, y += 4) {                                                                    \
      const float *px[4] = {x[0], x[m > 1], x[m > 2 ? 2 : m > 1], x[m > 3 ? 3 : m > 2 ? 2 : m > 1]};           \
      float *py[4] = {y[0], y[m > 1], y[m > 2 ? 2 : m > 1], y[m > 3 ? 3 : m > 2 ? 2 : m > 1]};                 \
      if (m == 1) body(what, 1, w, n0, n1, px, py);                                                            \
      else if (m == 2) body(what, 2, w, n0, n1, px, py);                                                       \
      else body(what, 4, w, n0, n1, px, py);                                                                   \
    }                                                                                                          \
  }

#ifdef __x86_64__
#include <immintrin.h>
#include "lanes_avx512.h"
#include "products.h"
#include "products_bf16.h"
#include "lanes_avx2.h"
#include "products.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#include "lanes_neon.h"
#include "products.h"
#endif

// -- one weight after the other ---------------------------------------------------------------------------------

static float weight_at(const Matrix *w, int n, int k) {
  static const float FLOATS[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  const Spec *spec = w->spec;
  const size_t i = (size_t)n * (size_t)w->columns + (size_t)k, across = (size_t)w->across;
  const uint8_t nibble = spec->codes >= INT4 ? w->codes[i / 2] >> 4 * (k & 1) & 15 : 0;
  const uint32_t *words = (const uint32_t *)w->scales;
  const int g = spec->group ? k / spec->group : 0;
  float value = 0, unit = 1;
  switch (spec->codes) {
    case F32: memcpy(&value, w->codes + 4 * i, 4); return value;
    case F16: return half_of(((const uint16_t *)w->codes)[i]);
    case BF16: return brain_of(((const uint16_t *)w->codes)[i]);
    case INT8: value = (float)(int8_t)w->codes[i]; break;
    case E4M3: value = e4m3_of(w->codes[i]); break;
    case INT4: {
      const uint32_t word = words[(size_t)(spec->zeros ? g : g >> 1) * across + (size_t)n];
      const uint16_t bits = (uint16_t)(spec->zeros ? word : word >> 16 * (g & 1));
      return ((float)nibble - (spec->zeros ? (float)(word >> 16) : 8.f)) * (spec->dtype == F16 ? half_of(bits) : brain_of(bits));
    }
    default: {  // E2M1
      value = nibble & 8 ? -FLOATS[nibble & 7] : FLOATS[nibble & 7];
      const int nv = spec->group == 16;
      const uint8_t code = (uint8_t)(words[(size_t)(nv + (g >> 2)) * across + (size_t)n] >> 8 * (g & 3));
      if (!nv) return code == 255 ? NAN : value * ldexpf(1.f, code - 127);
      memcpy(&unit, words + n, 4);
      return value * (e4m3_of(code) * unit);
    }
  }
  return value * ((const float *)w->scales)[(size_t)g * across + (size_t)(n / spec->rows)];
}

static void plain(const Matrix *w, int n0, int n1, const float *const *x, int m, float *const *y) {
  enum { AT_ONCE = 256 };
  float weights[AT_ONCE];
  for (int n = n0; n < n1; n++) {
    for (int i = 0; i < m; i++) y[i][n - n0] = 0;
    for (int from = 0; from < w->columns; from += AT_ONCE) {
      const int count = w->columns - from < AT_ONCE ? w->columns - from : AT_ONCE;
      for (int k = 0; k < count; k++) weights[k] = weight_at(w, n, from + k);
      for (int i = 0; i < m; i++) {
        float sum = 0;
        for (int k = 0; k < count; k++) sum += weights[k] * x[i][from + k];
        y[i][n - n0] += sum;
      }
    }
  }
}

int has_isa(int isa) {
#ifdef __x86_64__
  __builtin_cpu_init();
  const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == AVX2) return avx2;
  const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == AVX512) return avx512;
  if (isa == AVX512_BF16) return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#elif defined(__aarch64__) && defined(__ARM_NEON)
  if (isa == NEON) return 1;
#endif
  return isa == PLAIN;
}

Kernel kernel_of(const Spec *spec, int isa) {
  Kernel kernel = {NULL, 0, 1, 0};
#ifdef __x86_64__
  if (isa == AVX512_BF16) kernel = kernel_bf16(spec);
  if (isa == AVX512) kernel = kernel_avx512(spec);
  if (isa == AVX2) kernel = kernel_avx2(spec);
#elif defined(__aarch64__) && defined(__ARM_NEON)
  if (isa == NEON) kernel = kernel_neon(spec);
#endif
  return kernel.product ? kernel : (Kernel){plain, 0, 1, 0};
}
