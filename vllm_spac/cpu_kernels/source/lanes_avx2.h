// Vectors of 8 lanes: AVX2, FMA, F16C.
#define FN __attribute__((target("avx2,fma,f16c")))
#define ON(name) name##_avx2
#define L 8
#define CHAINS 2
#define VF __m256
#define VI __m256i
#define zero_ _mm256_setzero_ps
#define all_ _mm256_set1_ps
#define load_ _mm256_loadu_ps
#define fma_ _mm256_fmadd_ps
#define mul_ _mm256_mul_ps
#define sub_ _mm256_sub_ps
#define add_ _mm256_add_ps
#define sum_ ON(sum)
#define right_ _mm256_srli_epi32
#define keep_(u) __asm__("" : "+x"(u))
#define words_(p) _mm256_loadu_si256((const void *)(p))
typedef struct { VF low, high; } ON(Lut);
FN INLINE float ON(sum)(VF v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FN INLINE ON(Lut) ON(lut)(const float *table) { return (ON(Lut)){load_(table), load_(table + 8)}; }
FN INLINE ON(Lut) ON(scaled)(ON(Lut) t, float zero, float scale) {
  VF z = all_(zero), s = all_(scale);
  return (ON(Lut)){mul_(sub_(t.low, z), s), mul_(sub_(t.high, z), s)};
}
FN INLINE VF ON(look)(ON(Lut) t, VI u) {
  VF low = _mm256_permutevar8x32_ps(t.low, u), high = _mm256_permutevar8x32_ps(t.high, u);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(u, 28)));
}
FN INLINE VF ON(halves)(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
FN INLINE VF ON(bytes)(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p))); }
FN INLINE void ON(brains)(const uint8_t *p, VF *v) {
  VI u = words_(p);
  v[0] = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
  v[1] = _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xFFFF0000)));
}
FN INLINE void ON(eights)(const uint8_t *p, VF *v) {
  VI u = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p)), 7);
  u = _mm256_and_si256(u, _mm256_set1_epi16((short)0xBFFF));
  v[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(u));
  v[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(u, 1));
}
FN INLINE VF ON(spread)(const float *of_groups, int group) {
  VI lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  VI index = group == 16 ? _mm256_srli_epi32(lanes, 1) : group == 32 ? _mm256_srli_epi32(lanes, 2) : group == 64 ? _mm256_srli_epi32(lanes, 3) : lanes;
  return _mm256_permutevar8x32_ps(load_(of_groups), index);
}
FN INLINE VF ON(exponents)(const uint32_t *s, size_t across, int block) {
  VI shift = _mm256_set_epi32(8, 8, 8, 8, 0, 0, 0, 0), ff = _mm256_set1_epi32(255);
  VI e = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)(s[(block >> 1) * across] >> 16 * (block & 1))), shift), ff);
  VI nan = _mm256_and_si256(_mm256_cmpeq_epi32(e, ff), _mm256_set1_epi32(0x7FC00000));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(e, 23), nan));
}
FN INLINE VF ON(quarters)(const uint32_t *s, size_t across, int block, int words) {
  (void)words;
  VI u = _mm256_srlv_epi32(_mm256_set1_epi32((int)s[block * across]), _mm256_set_epi32(24, 24, 16, 16, 8, 8, 0, 0));
  u = _mm256_slli_epi32(_mm256_and_si256(u, _mm256_set1_epi32(255)), 7);
  __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
  return _mm256_cvtph_ps(h);
}
