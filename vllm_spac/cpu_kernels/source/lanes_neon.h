// Vectors of 4 lanes: NEON, as every processor of 64-bit Arm has it. Ran under an emulator only.
#define FN
#define ON(name) name##_neon
#define L 4
#define CHAINS 4
#define VF float32x4_t
#define VI uint32x4_t
#define zero_() vdupq_n_f32(0)
#define all_ vdupq_n_f32
#define load_ vld1q_f32
#define fma_(a, b, c) vfmaq_f32(c, a, b)
#define mul_ vmulq_f32
#define sub_ vsubq_f32
#define add_ vaddq_f32
#define sum_ vaddvq_f32
#define right_(u, bits) ((u) >> (uint32_t)(bits))
#define keep_(u) __asm__("" : "+w"(u))
#define words_(p) vreinterpretq_u32_u8(vld1q_u8(p))
typedef struct { VF v[4]; } ON(Lut);
FN INLINE ON(Lut) ON(lut)(const float *table) { return (ON(Lut)){{load_(table), load_(table + 4), load_(table + 8), load_(table + 12)}}; }
FN INLINE ON(Lut) ON(scaled)(ON(Lut) t, float zero, float scale) {
  for (int i = 0; i < 4; i++) t.v[i] = mul_(sub_(t.v[i], all_(zero)), all_(scale));
  return t;
}
FN INLINE VF ON(look)(ON(Lut) t, VI u) {  // bytes 4 u ... 4 u + 3 of the table
  uint8x16x4_t bytes;
  for (int i = 0; i < 4; i++) bytes.val[i] = vreinterpretq_u8_f32(t.v[i]);
  const VI at = vmlaq_n_u32(vdupq_n_u32(0x03020100), vandq_u32(u, vdupq_n_u32(15)), 0x04040404);
  return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(at)));
}
FN INLINE VF ON(halves)(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
FN INLINE VF ON(bytes)(const uint8_t *p) {
  uint32_t word;
  memcpy(&word, p, 4);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(word))))));
}
FN INLINE void ON(brains)(const uint8_t *p, VF *v) {
  const VI u = words_(p);
  v[0] = vreinterpretq_f32_u32(vshlq_n_u32(u, 16));
  v[1] = vreinterpretq_f32_u32(vandq_u32(u, vdupq_n_u32(0xFFFF0000)));
}
FN INLINE void ON(eights)(const uint8_t *p, VF *v) {
  const int16x8_t u = vshlq_n_s16(vmovl_s8(vld1_s8((const int8_t *)p)), 7);
  const float16x8_t h = vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(u), vdupq_n_u16(0xBFFF)));
  v[0] = vcvt_f32_f16(vget_low_f16(h)), v[1] = vcvt_f32_f16(vget_high_f16(h));
}
FN INLINE VF ON(spread)(const float *of_groups, int group) {
  const VF v = load_(of_groups);
  return group == 16 ? vzip1q_f32(v, v) : vdupq_laneq_f32(v, 0);
}
FN INLINE VF ON(exponents)(const uint32_t *s, size_t across, int block) {
  const uint32_t e = s[(size_t)(block >> 2) * across] >> 8 * (block & 3) & 255;
  return all_(float_of(e == 255 ? 0x7FC00000 : e << 23));
}
FN INLINE VF ON(quarters)(const uint32_t *s, size_t across, int block, int words) {
  (void)words;
  const uint32_t both = s[(size_t)(block >> 1) * across] >> 16 * (block & 1);
  const uint16_t halves[4] = {(uint16_t)((both & 255) << 7), (uint16_t)((both & 255) << 7), (uint16_t)((both >> 8 & 255) << 7), (uint16_t)((both >> 8 & 255) << 7)};
  return ON(halves)((const uint8_t *)halves);
}
