// As products.h for rows of x in bfloat16, by AVX-512 BF16 and VBMI: pairs of products in one operation. All codes are
// exact in bfloat16, so weights are looked up as such, and sums of a group are scaled in float32.
//
// Bytes of codes are interleaved by `unpack`, within 128 bits: x is stored in that order, see `place` in layer.c.
#define FN __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma,f16c")))
#define dot_(a, w, x) _mm512_dpbf16_ps(a, (__m512bh)(w), (__m512bh)(x))
#define EACH(i, n) for (int i = 0; i < (n); i++)
#define SUMS(M) ((M) > 4 ? 1 : (M) > 2 ? 2 : 4)  // of each row of x: a sum waits six cycles for the one before it

enum { MOST = 8, NEAR = 1024 };  // rows of x that share what is decoded; columns of so many that the first cache holds

// As PRODUCT; rows that the first cache holds are taken by up to eight.
#define PRODUCT8(name, body, what)                                                                               \
  FN static void name(const Matrix *w, int n0, int n1, const float *const *x, int m, float *const *y) {          \
    for (const int most = w->columns <= NEAR ? MOST : 4; m > 0; m -= most, x += most, y += most) {               \
      const float *px[MOST];                                                                                     \
      float *py[MOST];                                                                                           \
      for (int i = 0; i < MOST; i++) px[i] = x[i < m ? i : m - 1], py[i] = y[i < m ? i : m - 1];                 \
      if (m == 1) body(what, 1, w, n0, n1, px, py);                                                              \
      else if (m == 2) body(what, 2, w, n0, n1, px, py);                                                         \
      else if (m <= 4 || most == 4) body(what, 4, w, n0, n1, px, py);                                            \
      else body(what, MOST, w, n0, n1, px, py);                                                                  \
    }                                                                                                            \
  }
typedef __m512i Words;
typedef struct { Words low, high; } Halves;  // bytes of bfloat16, by code

static uint8_t e4m3_halves[2][128], four_halves[18][2][64];  // of 4 bits: code - zero for zeros 0 ... 16, and e2m1

__attribute__((constructor)) static void fill_halves(void) {
  static const float FLOATS[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  for (int i = 0; i < 128; i++) {
    const float value = e4m3_of((uint8_t)i);
    uint32_t word;
    memcpy(&word, &value, 4);
    e4m3_halves[0][i] = (uint8_t)(word >> 16), e4m3_halves[1][i] = (uint8_t)(word >> 24);
  }
  for (int t = 0; t < 18; t++)
    for (int i = 0; i < 64; i++) {
      const int code = i & 15;
      const float value = t == 17 ? (code & 8 ? -FLOATS[code & 7] : FLOATS[code & 7]) : (float)(code - t);
      uint32_t word;
      memcpy(&word, &value, 4);
      four_halves[t][0][i] = (uint8_t)(word >> 16), four_halves[t][1][i] = (uint8_t)(word >> 24);
    }
}

FN INLINE Words words_bf16(const void *p) { return _mm512_loadu_si512(p); }

FN INLINE void clear_bf16(const int M, const int sums, __m512 (*a)[4]) {
  EACH(m, M) EACH(v, sums) a[m][v] = _mm512_setzero_ps();
}

FN INLINE __m512 all_bf16(const int sums, __m512 *a) {
  if (sums == 1) return a[0];
  const __m512 first = _mm512_add_ps(a[0], a[1]);
  return sums == 2 ? first : _mm512_add_ps(first, _mm512_add_ps(a[2], a[3]));
}

// Sums of the lanes of each row; those of eight in fewer operations than of one after another.
FN INLINE void store_bf16(const int M, __m512 *total, float *const *y, int n) {
  if (M < 8) {
    EACH(m, M) y[m][n] = _mm512_reduce_add_ps(total[m]);
    return;
  }
  __m512 halves[4], quarters[2];
  EACH(i, 4) halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(total[2 * i], total[2 * i + 1], 0x44), _mm512_shuffle_f32x4(total[2 * i], total[2 * i + 1], 0xEE));
  EACH(i, 2) quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88), _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xDD));
  __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(quarters[0], quarters[1], 0x44), _mm512_shuffle_ps(quarters[0], quarters[1], 0xEE));
  sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xB1));
  float lanes[16];  // row m is in lane 4 (m % 4) + 2 (m / 4)
  _mm512_storeu_ps(lanes, sum);
  EACH(m, 8) y[m][n] = lanes[4 * (m % 4) + 2 * (m / 4)];
}

FN INLINE void step_bf16(const int codes, const int M, const int sums, const uint8_t *w, const uint16_t *const *x, size_t k, const Halves *t, __m512 (*a)[4], int from) {
  if (codes == BF16) {
    const Words v = words_bf16(w);
    EACH(m, M) a[m][from % sums] = dot_(a[m][from % sums], v, words_bf16(x[m] + k));
    return;
  }
  const Words u = words_bf16(w), low = _mm512_permutex2var_epi8(t[0].low, u, t[0].high);
  Words high = _mm512_permutex2var_epi8(t[1].low, u, t[1].high);
  high = _mm512_ternarylogic_epi32(u, _mm512_set1_epi8((char)0x80), high, 0xEA);  // its sign
  const Words v[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  EACH(d, 2) EACH(m, M) a[m][(from + d) % sums] = dot_(a[m][(from + d) % sums], v[d], words_bf16(x[m] + k + 32 * d));
}

FN INLINE void wide_bf16(const int codes, const int M, const Matrix *w, int n0, int n1, const float *const *px, float *const *y) {
  const size_t size = codes == BF16 ? 2 : 1, width = codes == BF16 ? 32 : 64;
  const size_t columns = (size_t)w->columns, group = w->spec->group ? (size_t)w->spec->group : columns;
  const float *scales = w->scales;
  const int sums = SUMS(M);
  const uint16_t *const *x = (const uint16_t *const *)px;
  const Halves t[2] = {{words_bf16(e4m3_halves[0]), words_bf16(e4m3_halves[0] + 64)}, {words_bf16(e4m3_halves[1]), words_bf16(e4m3_halves[1] + 64)}};
  for (int n = n0; n < n1; n++) {
    const uint8_t *row = w->codes + (size_t)n * columns * size;
    __m512 total[MOST], a[MOST][4];
    EACH(m, M) total[m] = _mm512_setzero_ps();
    for (size_t from = 0, g = 0; from < columns; from += group, g++) {
      const size_t to = from + group < columns ? from + group : columns;
      size_t k = from;
      clear_bf16(M, sums, a);
      for (; k + 2 * width <= to; k += 2 * width) {
        step_bf16(codes, M, sums, row + k * size, x, k, t, a, 0);
        step_bf16(codes, M, sums, row + (k + width) * size, x, k + width, t, a, codes == BF16 ? 1 : 2);
      }
      for (; k < to; k += width) {
        uint8_t rest[64] = {0};
        const size_t left = to - k < width ? to - k : width;
        memcpy(rest, row + k * size, left * size);
        step_bf16(codes, M, sums, rest, x, k, t, a, 0);
      }
      const float s = scales ? scales[g * (size_t)w->across + (size_t)(n / w->spec->rows)] : 1.f;
      const __m512 scale = _mm512_set1_ps(s);
      EACH(m, M) {
        __m512 v = all_bf16(sums, a[m]);
        if (w->spec->activations >= 0) v = _mm512_mul_ps(v, _mm512_set1_ps(px[m][padded_of(w->columns) + g]));
        total[m] = _mm512_fmadd_ps(v, scale, total[m]);
      }
    }
    store_bf16(M, total, y, n - n0);
  }
}

FN INLINE void block_bf16(const int M, const int sums, const uint8_t *w, Halves t, const uint16_t *const *x, size_t k, __m512 (*a)[4]) {
  const Words u = words_bf16(w), nibble = _mm512_set1_epi8(15);
  const Words index[2] = {_mm512_and_si512(u, nibble), _mm512_and_si512(_mm512_srli_epi16(u, 4), nibble)};
  EACH(i, 2) {
    const Words low = _mm512_shuffle_epi8(t.low, index[i]), high = _mm512_shuffle_epi8(t.high, index[i]);
    const Words v[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    EACH(d, 2) EACH(m, M) a[m][(2 * i + d) % sums] = dot_(a[m][(2 * i + d) % sums], v[d], words_bf16(x[m] + k + 64 * i + 32 * d));
  }
}

FN INLINE Halves table_of(float zero) {
  if (zero <= 16) return (Halves){words_bf16(four_halves[(int)zero][0]), words_bf16(four_halves[(int)zero][1])};
  // No packer writes these: differences beyond 256 are rounded.
  const __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(codes, _mm512_set1_ps(zero)));
  const __m128i low = _mm256_cvtepi16_epi8(values), high = _mm256_cvtepi16_epi8(_mm256_srli_epi16(values, 8));
  return (Halves){_mm512_broadcast_i32x4(low), _mm512_broadcast_i32x4(high)};
}

// NVFP4: the scales of groups 2 q (odd = 0) or 2 q + 1, in the lanes of 128 bits q.
FN INLINE __m512 of_pairs(const uint32_t *s, size_t across, int block, int words, int odd) {
  const uint32_t second = 2 * block + 1 < words ? s[(size_t)(2 * block + 1) * across] : 0;
  const Words both = _mm512_set1_epi64((long long)((uint64_t)s[(size_t)(2 * block) * across] | (uint64_t)second << 32));
  const Words lanes = _mm512_set_epi32(6, 6, 6, 6, 4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0);
  const Words at = _mm512_or_si512(_mm512_add_epi32(lanes, _mm512_set1_epi32(odd)), _mm512_set1_epi32((int)0x80808000));
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_slli_epi32(_mm512_shuffle_epi8(both, at), 7)));
}

// The loops call nothing, for which sums would be stored: what is left of a row is copied before them.
FN INLINE void narrow_bf16(const int how, const int M, const Matrix *w, int n0, int n1, const float *const *px, float *const *y) {
  const int columns = w->columns, words = (columns + 63) / 64, whole = columns / 128 * 128;
  const int group = how == WHOLE_avx512 && w->spec->group ? w->spec->group : columns;
  const int sums = how == NV_avx512 && M > 4 ? 2 : SUMS(M);  // there the first and the third have the even groups
  const int fixed = how == MX_avx512 || how == NV_avx512 ? 17 : 8;
  const uint16_t *const *x = (const uint16_t *const *)px;
  for (int n = n0; n < n1; n++) {
    const uint8_t *row = w->codes + (size_t)n * (size_t)(columns / 2);
    const uint32_t *s = (const uint32_t *)w->scales + n;
    __m512 total[MOST], a[MOST][4], unit = _mm512_setzero_ps();
    Halves t = {words_bf16(four_halves[fixed][0]), words_bf16(four_halves[fixed][1])};
    uint8_t rest[64] = {0};
    EACH(m, M) total[m] = _mm512_setzero_ps();
    if (whole < columns) memcpy(rest, row + whole / 2, (size_t)(columns - whole) / 2);
    if (how == NV_avx512) unit = _mm512_set1_ps(256.f * float_of(*s));
    if (how == WHOLE_avx512)
      for (int from = 0, g = 0; from < columns; from += group) {
        const int to = from + group < columns ? from + group : columns;
        float zero, scale = int4_scale_avx512(w, s, g++, &zero);
        if (w->spec->zeros) t = table_of(zero);
        clear_bf16(M, sums, a);
        for (int k = from; k < to; k += 128) block_bf16(M, sums, k < whole ? row + k / 2 : rest, t, x, (size_t)k, a);
        EACH(m, M) total[m] = _mm512_fmadd_ps(all_bf16(sums, a[m]), _mm512_set1_ps(scale), total[m]);
      }
    else
      for (int k = 0; k < columns; k += 128) {
        clear_bf16(M, sums, a);
        block_bf16(M, sums, k < whole ? row + k / 2 : rest, t, x, (size_t)k, a);
        if (how == NV_avx512) {
          const __m512 even = _mm512_mul_ps(of_pairs(s + w->across, (size_t)w->across, k / 128, words, 0), unit);
          const __m512 odd = _mm512_mul_ps(of_pairs(s + w->across, (size_t)w->across, k / 128, words, 1), unit);
          EACH(m, M) total[m] = _mm512_fmadd_ps(sums == 2 ? a[m][0] : _mm512_add_ps(a[m][0], a[m][2]), even, total[m]);
          EACH(m, M) total[m] = _mm512_fmadd_ps(sums == 2 ? a[m][1] : _mm512_add_ps(a[m][1], a[m][3]), odd, total[m]);
        } else {
          __m512 zeros;
          const __m512 each = of_lanes_avx512(how, w, n, k / 128, &zeros);
          EACH(m, M) total[m] = _mm512_fmadd_ps(all_bf16(sums, a[m]), each, total[m]);
        }
      }
    store_bf16(M, total, y, n - n0);
  }
}

PRODUCT8(bf16_bf16, wide_bf16, BF16)
PRODUCT8(e4m3_bf16, wide_bf16, E4M3)
PRODUCT8(whole_bf16, narrow_bf16, WHOLE_avx512)
PRODUCT8(lanes_bf16, narrow_bf16, LANES_avx512)
PRODUCT8(mx_bf16, narrow_bf16, MX_avx512)
PRODUCT8(nv_bf16, narrow_bf16, NV_avx512)

// What this has no kernel for is AVX-512's: other rows of x, INT8, zero points by small groups.
static Kernel kernel_bf16(const Spec *spec) {
  const int group = spec->group, codes = spec->codes;
  Product *product = NULL;
  if (spec->dtype != BF16) return kernel_avx512(spec);
  if (codes == BF16) return (Kernel){bf16_bf16, 0, 0, 1};
  if (codes == E4M3 && group % 64 == 0) return (Kernel){e4m3_bf16, 0, 64, 1};
  if (codes == E2M1) product = group == 32 ? mx_bf16 : nv_bf16;
  else if (codes == INT4 && group % 128 == 0) product = whole_bf16;
  else if (codes == INT4 && !spec->zeros && (group == 32 || group == 64)) product = lanes_bf16;
  return product ? (Kernel){product, 1, 64, 1} : kernel_avx512(spec);
}
#undef FN
#undef EACH
#undef dot_
#undef SUMS
#undef PRODUCT8
