// What a request computes: rows to float32 in planes; gate, up and activation; rounding of h; down, weighted and summed.
#include "layer.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { AT_ONCE = 32, MOST_TILE = 32 };  // rows of x of one product; rows of a tile

static const Kernel NATURAL = {NULL, 0, 1, 0};  // the order of columns before they are rounded

static int rounds(const Spec *spec) { return spec->activations >= 0; }

// Whether h is rounded to e4m3 at once, as `Format.fused`.
static int fuses(const Spec *spec) { return spec->rows == 128 && spec->activations == 128 && spec->activation == SILU; }

static int valid(const Spec *s) {
  return s->codes >= 0 && s->codes < CODES && s->dtype >= F32 && s->dtype <= BF16 && s->activation >= 0 && s->activation < ACTIVATIONS && s->hidden > 0 &&
         s->intermediate > 0 && s->experts > 0 && s->group >= 0 && s->rows > 0 && s->activations >= -1 && s->hidden < 1 << 20 && s->intermediate < 1 << 20 && s->experts <= 1 << 16 &&
         (s->codes < INT4 || (s->group % 2 == 0 && s->hidden % 2 == 0 && s->intermediate % 2 == 0 && s->rows == 1)) &&
         (s->codes != E2M1 || s->group == 32 || s->group == 16) && (s->codes != INT4 || s->dtype != F32) && (s->activations < 0 || s->codes == E4M3) &&
         (s->codes > BF16 || s->codes == s->dtype);
}

// The words of a row of scales, and how many such rows a matrix has; as `Format.scale_shape`.
static size_t scale_words(const Spec *s, int rows, int columns, int *across) {
  const int groups = s->group ? (columns + s->group - 1) / s->group : 1, per = s->codes == E2M1 ? 4 : s->codes == INT4 && !s->zeros ? 2 : 1;
  *across = ((rows + s->rows - 1) / s->rows + 3) / 4 * 4;
  return (size_t)(s->codes == E2M1 && s->group == 16) + (size_t)(groups + per - 1) / (size_t)per;
}

static int fits(const Spec *s, const Table *codes, const Table *scales, const Table *bias, int rows, int columns, Matrix *matrix) {
  const size_t elements = (size_t)rows * (size_t)columns, size = s->dtype == F32 ? 4 : 2;
  const size_t bytes = s->codes == F32 ? 4 * elements : s->codes <= BF16 ? 2 * elements : s->codes <= E4M3 ? elements : elements / 2;
  *matrix = (Matrix){NULL, NULL, rows, columns, 0, s};
  if (!codes->at || codes->bytes < bytes || (bias->at && bias->bytes < (size_t)rows * size)) return 0;
  if (s->codes <= BF16) return 1;
  const size_t words = scale_words(s, rows, columns, &matrix->across);
  return scales->at && scales->bytes >= 4 * words * (size_t)matrix->across;
}

static int room(Work *work, size_t bytes) {
  if (bytes <= work->bytes) return 1;
  free(work->memory);
  work->bytes = 0;
  if (!(work->memory = aligned_alloc(4096, bytes = (bytes + (1 << 16) - 1) & ~(size_t)4095))) return 0;
  work->bytes = bytes;
  return 1;
}

// Of a row of x or h: its columns, padded, and the scales of its groups; lines of 64 bytes.
static size_t stride_of(int columns) {
  const size_t padded = padded_of(columns);
  return padded + (padded / 64 + 15) / 16 * 16;
}

static void clear_pad(Kernel kernel, float *x, int columns) {  // its block may have columns of x among it
  const size_t from = (size_t)columns / PAD * PAD, size = kernel.half ? 2 : 4;
  memset((uint8_t *)x + from * size, 0, (padded_of(columns) - from) * size);
}

int prepare(Work *work, const Request *request, int isa, int threads) {
  work->request = *request, work->spec = *request->spec, work->layer = *request->layer;
  const Spec *spec = &work->spec;
  const Layer *layer = &work->layer;
  const int rows = request->rows, top_k = request->top_k;
  if (!valid(spec) || rows < 0 || top_k < 1 || top_k > 1 << 16 || rows > 1 << 24) return NO_SPEC;
  if (!fits(spec, &layer->w13, &layer->s13, &layer->b13, 2 * spec->intermediate, spec->hidden, &work->w13)) return NO_MEMORY;
  if (!fits(spec, &layer->w2, &layer->s2, &layer->b2, spec->hidden, spec->intermediate, &work->w2)) return NO_MEMORY;
  work->first = work->second = kernel_of(spec, isa);
  work->wide = stride_of(spec->hidden), work->narrow = stride_of(spec->intermediate);
  const size_t most = (size_t)rows * (size_t)top_k, experts = (size_t)spec->experts, r = (size_t)rows;
  const size_t integers = (3 * experts + 1 + most + 15) / 16 * 16;
  if (!room(work, 4 * (integers + (most + 15) / 16 * 16 + r * work->wide + most * work->narrow + r * (size_t)spec->hidden))) return NO_ROOM;
  int *count = work->memory;
  work->of_expert = count + experts, work->begins = work->of_expert + experts, work->row = work->begins + experts + 1;
  work->weight = (float *)work->memory + integers;
  work->x = work->weight + (most + 15) / 16 * 16;
  work->h = work->x + r * work->wide;
  work->total = work->h + most * work->narrow;
  memset(count, 0, experts * sizeof *count);
  for (size_t i = 0; i < most; i++) {
    const int expert = request->ids[i];
    if (expert >= spec->experts) return NO_EXPERT;
    if (expert >= 0 && request->weights[i] != 0) count[expert]++;
  }
  work->experts = work->pairs = 0;
  for (int e = 0; e < spec->experts; e++) {
    if (!count[e]) continue;
    const Table *tables[] = {&layer->w13, &layer->w2, &layer->s13, &layer->s2, &layer->b13, &layer->b2};
    for (int t = 0; t < 6; t++)
      if (tables[t]->at && !tables[t]->at[e]) return NO_MEMORY;
    work->of_expert[work->experts] = e, work->begins[work->experts++] = work->pairs;
    work->pairs += count[e], count[e] = work->pairs - count[e];  // where its next pair goes
  }
  work->begins[work->experts] = work->pairs;
  for (size_t i = 0; i < most; i++) {
    const int expert = request->ids[i];
    if (expert < 0 || request->weights[i] == 0) continue;
    const int at = count[expert]++;
    work->row[at] = (int)(i / (size_t)top_k), work->weight[at] = request->weights[i];
  }
  for (int p = 0; p < work->pairs; p++) clear_pad(rounds(spec) ? NATURAL : work->second, work->h + (size_t)p * work->narrow, spec->intermediate);
  int tile = spec->intermediate * (work->experts ? work->experts : 1) / (4 * threads);
  work->tile = tile = tile > MOST_TILE ? MOST_TILE : tile < 8 ? 8 : tile / 8 * 8;
  work->tiles[0] = rows;
  work->tiles[1] = work->experts * ((spec->intermediate + tile - 1) / tile);
  work->tiles[2] = rounds(spec) ? work->pairs : 0;
  work->tiles[3] = rows ? (spec->hidden + tile - 1) / tile : 0;
  return DONE;
}

static size_t place(Kernel kernel, int column) {  // of a column of x
  if (kernel.half) {
    const int codes = column & ((kernel.lanes << kernel.bits) - 1), byte = codes >> kernel.bits, odd = codes & kernel.bits;
    return (size_t)(kernel.lanes ? column - codes + 64 * odd + 32 * (byte >> 3 & 1) + 8 * (byte >> 4) + (byte & 7) : column);
  }
  const int within = column & ((kernel.lanes << kernel.bits) - 1), plane = within & ((1 << kernel.bits) - 1);
  return (size_t)(column - within + plane * kernel.lanes + (within >> kernel.bits));
}

static float element(int dtype, const void *values, size_t i) {
  return dtype == F32 ? ((const float *)values)[i] : dtype == F16 ? half_of(((const uint16_t *)values)[i]) : brain_of(((const uint16_t *)values)[i]);
}

static void put(Kernel kernel, float *x, int column, float value) {  // a half is a value of bfloat16
  uint32_t word;
  memcpy(&word, &value, 4);
  if (kernel.half) ((uint16_t *)x)[place(kernel, column)] = (uint16_t)(word >> 16);
  else x[place(kernel, column)] = value;
}

// Rounds columns of a row to e4m3, by groups that share a scale; as `kernels/reference/grouped_gemm.rounded_rows`. For a
// kernel of halves codes stay codes, which are exact, in its order, with the scales behind them.
static void round_row(Kernel kernel, float *values, int columns, int group, int fused) {
  const int width = group ? group : columns, padded = (int)padded_of(columns);
  float *scales = values + padded;
  for (int from = 0; from < columns; from += width) {
    const int to = from + width < columns ? from + width : columns;
    float largest = 0;
    for (int i = from; i < to; i++) largest = fmaxf(largest, fabsf(values[i]));
    const int divides = fused || !group;
    const float scale = divides ? fmaxf(largest / 448, 1.f / (448 * 512)) : fmaxf(largest, 1e-10f) / 448, inverse = 1 / scale;
    for (int i = from; i < to; i++) values[i] = round_to_e4m3(divides ? values[i] / scale : values[i] * inverse) * (kernel.half ? 1 : scale);
    if (kernel.half) scales[from / width] = scale;
  }
  for (int from = 0; kernel.half && from < padded; from += PAD) {  // in place: a block of halves begins before its values
    float block[PAD];
    memcpy(block, values + from, sizeof block);
    for (int i = 0; i < PAD; i++) put(kernel, values, from + i, block[i]);
  }
}

static void read_row(Work *work, int row) {
  const Spec *spec = &work->spec;
  const size_t d = (size_t)spec->hidden, from = (size_t)row * d;
  float *x = work->x + (size_t)row * work->wide;
  const Kernel kernel = rounds(spec) ? NATURAL : work->first;
  clear_pad(kernel, x, spec->hidden);
  for (int k = 0; k < spec->hidden; k++) put(kernel, x, k, element(spec->dtype, work->request.x, from + (size_t)k));
  if (rounds(spec)) round_row(work->first, x, spec->hidden, spec->activations, 0);
}

static float activated(const Spec *spec, float gate, float up, int fused) {
  const int openai = spec->activation == SWIGLUOAI || spec->activation == SWIGLUOAI_HALVES;
  if (openai || spec->activation == SILU_CLAMPED) {
    const float limit = openai ? 7.f : 10.f;
    gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
  }
  float acted;
  if (openai) acted = gate / (1 + expf(-1.702f * gate)), up += 1;
  else if (spec->activation == SILU || spec->activation == SILU_CLAMPED) acted = gate / (1 + expf(-gate));
  else if (spec->activation == GELU) acted = 0.5f * gate * (1 + erff(gate * 0.70710678f));
  else acted = 0.5f * gate * (1 + tanhf(0.79788456f * (gate + 0.044715f * gate * gate * gate)));
  return (fused || spec->activation == SWIGLUOAI ? acted : round_to(spec->dtype, acted)) * up;
}

static Matrix matrix_of(const Matrix *form, const Table *codes, const Table *scales, int expert) {
  Matrix w = *form;
  w.codes = (const uint8_t *)(uintptr_t)codes->at[expert];
  w.scales = w.spec->codes > BF16 ? (const void *)(uintptr_t)scales->at[expert] : NULL;
  return w;
}

static void up(Work *work, int tile) {
  const Spec *spec = &work->spec;
  const int of_expert = (spec->intermediate + work->tile - 1) / work->tile, e = tile / of_expert, expert = work->of_expert[e];
  const int from = tile % of_expert * work->tile, to = from + work->tile < spec->intermediate ? from + work->tile : spec->intermediate, width = to - from;
  const int paired = spec->activation == SWIGLUOAI;  // gate and up are neighbours
  const int fused = fuses(spec);
  const Kernel into = rounds(spec) ? NATURAL : work->second;
  const Matrix w = matrix_of(&work->w13, &work->layer.w13, &work->layer.s13, expert);
  const void *bias = work->layer.b13.at ? (const void *)(uintptr_t)work->layer.b13.at[expert] : NULL;
  float y[AT_ONCE][2 * MOST_TILE], *gates[AT_ONCE], *ups[AT_ONCE];
  const float *x[AT_ONCE];
  for (int begin = work->begins[e]; begin < work->begins[e + 1]; begin += AT_ONCE) {
    const int m = work->begins[e + 1] - begin < AT_ONCE ? work->begins[e + 1] - begin : AT_ONCE;
    for (int i = 0; i < m; i++) x[i] = work->x + (size_t)work->row[begin + i] * work->wide, gates[i] = y[i], ups[i] = y[i] + width;
    if (paired) {
      work->first.product(&w, 2 * from, 2 * to, x, m, gates);
    } else {
      work->first.product(&w, from, to, x, m, gates);
      work->first.product(&w, spec->intermediate + from, spec->intermediate + to, x, m, ups);
    }
    for (int i = 0; i < m; i++) {
      float *h = work->h + (size_t)(begin + i) * work->narrow;
      for (int c = 0; c < width; c++) {
        const int of_gate = paired ? 2 * c : c, of_up = paired ? 2 * c + 1 : c + width;
        const size_t g = (size_t)(paired ? 2 * (from + c) : from + c), u = paired ? g + 1 : g + (size_t)spec->intermediate;
        const float gate = round_to(spec->dtype, y[i][of_gate] + (bias ? element(spec->dtype, bias, g) : 0));
        const float value = activated(spec, gate, round_to(spec->dtype, y[i][of_up] + (bias ? element(spec->dtype, bias, u) : 0)), fused);
        put(into, h, from + c, fused ? value : round_to(spec->dtype, value));
      }
    }
  }
}

static void down(Work *work, int tile) {
  const Spec *spec = &work->spec;
  const size_t d = (size_t)spec->hidden;
  const int from = tile * work->tile, to = from + work->tile < spec->hidden ? from + work->tile : spec->hidden;
  float y[AT_ONCE][MOST_TILE], *out[AT_ONCE];
  const float *h[AT_ONCE];
  for (int row = 0; row < work->request.rows; row++) memset(work->total + (size_t)row * d + from, 0, (size_t)(to - from) * sizeof(float));
  for (int i = 0; i < AT_ONCE; i++) out[i] = y[i];
  for (int e = 0; e < work->experts; e++) {
    const int expert = work->of_expert[e];
    const Matrix w = matrix_of(&work->w2, &work->layer.w2, &work->layer.s2, expert);
    const void *bias = work->layer.b2.at ? (const void *)(uintptr_t)work->layer.b2.at[expert] : NULL;
    for (int begin = work->begins[e]; begin < work->begins[e + 1]; begin += AT_ONCE) {
      const int m = work->begins[e + 1] - begin < AT_ONCE ? work->begins[e + 1] - begin : AT_ONCE;
      for (int i = 0; i < m; i++) h[i] = work->h + (size_t)(begin + i) * work->narrow;
      work->second.product(&w, from, to, h, m, out);
      for (int i = 0; i < m; i++) {
        float *total = work->total + (size_t)work->row[begin + i] * d, weight = work->weight[begin + i];
        for (int n = from; n < to; n++) total[n] += weight * (y[i][n - from] + (bias ? element(spec->dtype, bias, (size_t)n) : 0));
      }
    }
  }
}

void compute(Work *work, int phase, int tile) {
  const Spec *spec = &work->spec;
  if (phase == 0) read_row(work, tile);
  if (phase == 1) up(work, tile);
  if (phase == 2) round_row(work->second, work->h + (size_t)tile * work->narrow, spec->intermediate, spec->activations, fuses(spec));
  if (phase == 3) down(work, tile);
}
