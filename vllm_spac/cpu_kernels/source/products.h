// Products of few rows with a matrix of weights as it lies in host memory. Included once per instruction set, whose
// vectors are named before: VF of L floats. A row of weights is read once, from its begin to its end, which is what
// memory is fastest with; M rows of x share what is decoded of it.

#define SUMS(M) ((M) > 2 ? 1 : CHAINS)  // of each row of x: a chain of additions waits for each of them
#define BLOCK4 (8 * L)             // columns whose 4-bit codes are one vector of words
#define DEPTH(codes) ((codes) == BF16 || (codes) == E4M3 ? 2 : 1)  // vectors that one load is decoded to
#define EACH(i, n) for (int i = 0; i < (n); i++)  // n is known once a body is inlined: -O3 unrolls it

FN INLINE void ON(clear)(const int M, VF (*a)[CHAINS]) {
  EACH(m, M) EACH(s, SUMS(M)) a[m][s] = zero_();
}

FN INLINE void ON(add_scaled)(const int M, VF (*total)[CHAINS], VF (*a)[CHAINS], VF scale) {
  EACH(m, M) EACH(s, SUMS(M)) total[m][s] = fma_(a[m][s], scale, total[m][s]);
}

FN INLINE void ON(store)(const int M, VF (*total)[CHAINS], float *const *y, int n) {
  EACH(m, M) {
    for (int s = 1; s < SUMS(M); s++) total[m][0] = add_(total[m][0], total[m][s]);
    y[m][n] = sum_(total[m][0]);
  }
}

FN INLINE void ON(step)(const int codes, const int M, const uint8_t *w, const float *const *x, size_t k, VF (*a)[CHAINS], int from) {
  VF v[2];
  if (codes == F32) v[0] = load_((const float *)w);
  if (codes == F16) v[0] = ON(halves)(w);
  if (codes == INT8) v[0] = ON(bytes)(w);
  if (codes == BF16) ON(brains)(w, v);
  if (codes == E4M3) ON(eights)(w, v);
  EACH(d, DEPTH(codes)) EACH(m, M) a[m][(from + d) % SUMS(M)] = fma_(v[d], load_(x[m] + k + d * L), a[m][(from + d) % SUMS(M)]);
}

// Weights of 8 bits or more; a scale is of a row, or of whole steps.
FN INLINE void ON(wide)(const int codes, const int M, const Matrix *w, int n0, int n1, const float *const *x, float *const *y) {
  const size_t size = codes == F32 ? 4 : codes <= BF16 ? 2 : 1, width = (size_t)DEPTH(codes) * L;
  const size_t columns = (size_t)w->columns, group = w->spec->group ? (size_t)w->spec->group : columns;
  const float *scales = w->scales, unit = codes == E4M3 ? 256.f : 1.f;
  for (int n = n0; n < n1; n++) {
    const uint8_t *row = w->codes + (size_t)n * columns * size;
    VF total[4][CHAINS], a[4][CHAINS];
    ON(clear)(M, total);
    for (size_t from = 0, g = 0; from < columns; from += group, g++) {
      const size_t to = from + group < columns ? from + group : columns;
      size_t k = from;
      ON(clear)(M, a);
      for (; k + 2 * width <= to; k += 2 * width) {
        ON(step)(codes, M, row + k * size, x, k, a, 0);
        ON(step)(codes, M, row + (k + width) * size, x, k + width, a, DEPTH(codes));
      }
      for (; k + width <= to; k += width) ON(step)(codes, M, row + k * size, x, k, a, 0);
      if (k < to) {  // only at the end of a row, where x is padded with zeros
        uint8_t rest[4 * 2 * L] = {0};
        memcpy(rest, row + k * size, (to - k) * size);
        ON(step)(codes, M, rest, x, k, a, 0);
      }
      ON(add_scaled)(M, total, a, all_(scales ? unit * scales[g * (size_t)w->across + (size_t)(n / w->spec->rows)] : 1.f));
    }
    ON(store)(M, total, y, n - n0);
  }
}

FN INLINE void ON(block)(const int M, const int less, const uint8_t *w, ON(Lut) t, VF zeros, const float *const *x, VF (*a)[CHAINS]) {
  VI u = words_(w);
  keep_(u);  // else the compiler loads it again for every shift
  EACH(j, 8) {
    VF v = ON(look)(t, j ? right_(u, 4 * j) : u);
    if (less) v = sub_(v, zeros);
    EACH(m, M) a[m][j % SUMS(M)] = fma_(v, load_(x[m] + j * L), a[m][j % SUMS(M)]);
  }
}

FN INLINE float ON(int4_scale)(const Matrix *w, const uint32_t *s, int g, float *zero) {
  const Spec *spec = w->spec;
  const uint32_t word = s[(size_t)(spec->zeros ? g : g >> 1) * (size_t)w->across], bits = spec->zeros ? word : word >> 16 * (g & 1);
  *zero = spec->zeros ? (float)(word >> 16) : 8.f;
  return spec->dtype == F16 ? half_of((uint16_t)bits) : brain_of((uint16_t)bits);
}

// How 4-bit codes are scaled: blocks as a whole, by the table that they are looked up in; or each lane, of 8 columns.
enum { ON(WHOLE), ON(LANES), ON(LANES_LESS), ON(MX), ON(NV) };

FN INLINE VF ON(of_lanes)(const int how, const Matrix *w, int n, int block, VF *zeros) {
  const uint32_t *s = (const uint32_t *)w->scales + n;
  const size_t across = (size_t)w->across;
  const int group = w->spec->group;
  if (how == ON(MX)) return ON(exponents)(s, across, block);
  if (how == ON(NV)) return mul_(ON(quarters)(s + across, across, block, (w->columns + 63) / 64), all_(256.f * float_of(*s)));
#if L == 16
  if (how == ON(LANES) && group >= 32) return ON(pairs)(s, across, block, (w->columns + group - 1) / group, group, w->spec->dtype);
#endif
  float scale[L] = {0}, zero[L] = {0};
  const int first = block * (BLOCK4 / group), last = (w->columns - 1) / group;
  for (int i = 0; i < BLOCK4 / group; i++)
    if (first + i <= last) scale[i] = ON(int4_scale)(w, s, first + i, &zero[i]);
  *zeros = ON(spread)(zero, group);
  return ON(spread)(scale, group);
}

FN INLINE void ON(narrow)(const int how, const int M, const Matrix *w, int n0, int n1, const float *const *x, float *const *y) {
  static const float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  static const float FLOATS[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
  const int columns = w->columns, group = w->spec->group ? w->spec->group : columns, whole = columns / BLOCK4 * BLOCK4;
  const ON(Lut) table = ON(lut)(how == ON(MX) || how == ON(NV) ? FLOATS : INTEGERS), centred = ON(scaled)(table, 8, 1);
  for (int n = n0; n < n1; n++) {
    const uint8_t *row = w->codes + (size_t)n * (size_t)(columns / 2);
    VF total[4][CHAINS], a[4][CHAINS], zeros = zero_();
    ON(Lut) t = how == ON(LANES) ? centred : table;
    ON(clear)(M, total);
    uint8_t rest[4 * L] = {0};
    if (whole < columns) memcpy(rest, row + whole / 2, (size_t)(columns - whole) / 2);
    for (int k = 0, g = 0, until = 0; k < columns; k += BLOCK4, row += 4 * L) {
      if (k == whole) row = rest;
      const float *px[4];
      EACH(m, M) px[m] = x[m] + k;
      if (how == ON(WHOLE)) {
        if (k == until) {
          float zero, scale = ON(int4_scale)(w, (const uint32_t *)w->scales + n, g++, &zero);
          t = ON(scaled)(table, zero, scale), until += group;
        }
        ON(block)(M, 0, row, t, zeros, px, total);
      } else {
        const VF scale = ON(of_lanes)(how, w, n, k / BLOCK4, &zeros);
        ON(clear)(M, a);
        ON(block)(M, how == ON(LANES_LESS), row, t, zeros, px, a);
        ON(add_scaled)(M, total, a, scale);
      }
    }
    ON(store)(M, total, y, n - n0);
  }
}

PRODUCT(ON(f32), ON(wide), F32)
PRODUCT(ON(f16), ON(wide), F16)
PRODUCT(ON(bf16), ON(wide), BF16)
PRODUCT(ON(int8), ON(wide), INT8)
PRODUCT(ON(e4m3), ON(wide), E4M3)
PRODUCT(ON(whole), ON(narrow), ON(WHOLE))
PRODUCT(ON(lanes), ON(narrow), ON(LANES))
PRODUCT(ON(lanes_less), ON(narrow), ON(LANES_LESS))
PRODUCT(ON(mx), ON(narrow), ON(MX))
PRODUCT(ON(nv), ON(narrow), ON(NV))

static Kernel ON(kernel)(const Spec *spec) {
  static Product *const WIDE[] = {ON(f32), ON(f16), ON(bf16), ON(int8), ON(e4m3)};
  const int group = spec->group, codes = spec->codes;
  if (codes <= E4M3) return (Kernel){group % (DEPTH(codes) * L) ? NULL : WIDE[codes], codes == BF16, L, 0};
  if (codes == E2M1) return (Kernel){group == 32 ? ON(mx) : ON(nv), 3, L, 0};
  if (group % BLOCK4 == 0) return (Kernel){ON(whole), 3, L, 0};
  const int lanes = BLOCK4 % group == 0 && group % 16 == 0;
  return (Kernel){!lanes ? NULL : spec->zeros ? ON(lanes_less) : ON(lanes), 3, L, 0};
}

#undef FN
#undef ON
#undef L
#undef CHAINS
#undef VF
#undef VI
#undef zero_
#undef all_
#undef load_
#undef fma_
#undef mul_
#undef sub_
#undef add_
#undef sum_
#undef right_
#undef words_
#undef keep_
#undef SUMS
#undef BLOCK4
#undef DEPTH
#undef EACH
