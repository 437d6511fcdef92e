// Vectors of 16 lanes: AVX-512 F, BW, VL, DQ.
#define FN __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define ON(name) name##_avx512
#define L 16
#define CHAINS 2
#define VF __m512
#define VI __m512i
#define zero_ _mm512_setzero_ps
#define all_ _mm512_set1_ps
#define load_ _mm512_loadu_ps
#define fma_ _mm512_fmadd_ps
#define mul_ _mm512_mul_ps
#define sub_ _mm512_sub_ps
#define add_ _mm512_add_ps
#define sum_ _mm512_reduce_add_ps
#define right_ _mm512_srli_epi32
#define keep_(u) __asm__("" : "+v"(u))
#define words_(p) _mm512_loadu_si512(p)
typedef struct { VF a; } ON(Lut);
FN INLINE ON(Lut) ON(lut)(const float *table) { return (ON(Lut)){load_(table)}; }
FN INLINE ON(Lut) ON(scaled)(ON(Lut) t, float zero, float scale) { return (ON(Lut)){mul_(sub_(t.a, all_(zero)), all_(scale))}; }
FN INLINE VF ON(look)(ON(Lut) t, VI u) { return _mm512_permutexvar_ps(u, t.a); }
FN INLINE VF ON(halves)(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
FN INLINE VF ON(bytes)(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p))); }
FN INLINE void ON(brains)(const uint8_t *p, VF *v) {
  VI u = words_(p);
  v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  v[1] = _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xFFFF0000)));
}
// As fp16 with the exponent of e4m3: 2^-8 of the value. Subnormals are exact, and cost nothing.
FN INLINE void ON(eights)(const uint8_t *p, VF *v) {
  VI u = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p)), 7);
  u = _mm512_and_si512(u, _mm512_set1_epi16((short)0xBFFF));
  v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(u));
  v[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(u, 1));
}
FN INLINE VF ON(spread)(const float *of_groups, int group) {  // lane i has the scale of column 8 i
  VI lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  VI index = group == 16 ? _mm512_srli_epi32(lanes, 1) : group == 32 ? _mm512_srli_epi32(lanes, 2) : group == 64 ? _mm512_srli_epi32(lanes, 3) : lanes;
  return _mm512_permutexvar_ps(index, load_(of_groups));
}
FN INLINE VF ON(pairs)(const uint32_t *s, size_t across, int block, int groups, int group, int dtype) {  // a word has 2 scales
  int first = group == 32 ? 2 * block : block, second = group == 32 && 2 * first + 2 < groups;  // of the words
  uint32_t more = second ? s[(size_t)(first + 1) * across] : 0;
  VI u = _mm512_set1_epi64((long long)((uint64_t)s[(size_t)first * across] | (uint64_t)more << 32));
  VI odd = group == 32 ? _mm512_set_epi32(16, 16, 16, 16, 0, 0, 0, 0, 16, 16, 16, 16, 0, 0, 0, 0) : _mm512_set_epi32(16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0);
  VI word = group == 32 ? _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0) : _mm512_setzero_si512();
  u = _mm512_srlv_epi32(_mm512_permutexvar_epi32(word, u), odd);
  return dtype == F16 ? _mm512_cvtph_ps(_mm512_cvtepi32_epi16(u)) : _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
FN INLINE VF ON(exponents)(const uint32_t *s, size_t across, int block) {  // MXFP4: a word has 4 groups of 32
  VI shift = _mm512_set_epi32(24, 24, 24, 24, 16, 16, 16, 16, 8, 8, 8, 8, 0, 0, 0, 0);
  VI e = _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32((int)s[block * across]), shift), _mm512_set1_epi32(255));
  __mmask16 nan = _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(255));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_slli_epi32(e, 23), nan, _mm512_set1_epi32(0x7FC00000)));
}
FN INLINE VF ON(quarters)(const uint32_t *s, size_t across, int block, int words) {  // NVFP4: a word has 4 groups of 16
  uint32_t second = 2 * block + 1 < words ? s[(2 * block + 1) * across] : 0;
  VI u = _mm512_set1_epi64((long long)((uint64_t)s[2 * block * across] | (uint64_t)second << 32));
  VI shift = _mm512_set_epi32(24, 24, 16, 16, 8, 8, 0, 0, 24, 24, 16, 16, 8, 8, 0, 0);
  u = _mm512_permutexvar_epi32(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), u);
  u = _mm512_slli_epi32(_mm512_and_si512(_mm512_srlv_epi32(u, shift), _mm512_set1_epi32(255)), 7);
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(u));
}
