// cublasLt's products of bf16, done at once by plain loops: D = A^T B + bias, everything column-major, as its documentation
// says. The signatures are those of cublasLt.h 13.0.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int type; uint64_t rows, cols; int64_t ld; } Layout;
typedef struct { int transposed, epilogue, bias_type; const uint16_t *bias; } Desc;
enum { F32 = 0, BF16 = 14, NOT_SUPPORTED = 15 };
static int n_heuristics;
int fake_heuristics(void) { return n_heuristics; }

static float value(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &word, 4);
  return x;
}
static uint16_t round16(float x) {
  uint32_t word;
  memcpy(&word, &x, 4);
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtCreate(void **handle) { *handle = (void *)6; return 0; }
int cublasLtDestroy(void *handle) { return 0; }
int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *layout = malloc(sizeof **layout);
  **layout = (Layout){type, rows, cols, ld};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { free(layout); return 0; }
int cublasLtMatmulDescCreate(Desc **desc, int compute, int scale) {
  *desc = calloc(1, sizeof **desc);
  return compute == 68 && scale == F32 ? 0 : NOT_SUPPORTED;
}
int cublasLtMatmulDescDestroy(Desc *desc) { free(desc); return 0; }
int cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *from, size_t n) {
  if (attribute == 3 && n == 4) return memcpy(&desc->transposed, from, n), 0;
  if (attribute == 7 && n == 4) return memcpy(&desc->epilogue, from, n), 0;
  if (attribute == 8 && n == 8) return memcpy(&desc->bias, from, n), 0;
  if (attribute == 26 && n == 4) return memcpy(&desc->bias_type, from, n), 0;
  return NOT_SUPPORTED;
}
int cublasLtMatmulPreferenceCreate(void **preference) { *preference = (void *)7; return 0; }
int cublasLtMatmulPreferenceDestroy(void *preference) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *from, size_t n) {
  return attribute == 1 && n == 8 && *(const size_t *)from == 32u << 20 ? 0 : NOT_SUPPORTED;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, Desc *desc, Layout *a, Layout *b, Layout *c, Layout *d, void *preference,
                                   int wanted, void *results, int *n) {
  int fits = desc->transposed == 1 && a->rows == b->rows && d->rows == a->cols && d->cols == b->cols && c == d;
  ++n_heuristics;
  // The algorithm's 64 bytes, the workspace's size, the state, the waves, and reserved words.
  memset(results, 0, 64 + 8 + 4 + 4 + 16);
  *n = fits;
  return 0;
}
int cublasLtMatmul(void *handle, Desc *desc, const float *alpha, const uint16_t *a, Layout *la, const uint16_t *b,
                   Layout *lb, const float *beta, const void *c, Layout *lc, void *d, Layout *ld, const void *algo,
                   void *workspace, size_t n_bytes, void *stream) {
  if (*alpha != 1 || *beta != 0 || c != d || !workspace || n_bytes != 32u << 20 || stream != (void *)2) return 7;
  for (uint64_t j = 0; j < ld->cols; ++j)
    for (uint64_t i = 0; i < ld->rows; ++i) {
      float sum = 0;
      for (uint64_t k = 0; k < la->rows; ++k) sum += value(a[i * la->ld + k]) * value(b[j * lb->ld + k]);
      if (desc->epilogue == 4) sum += value(desc->bias_type == BF16 ? desc->bias[i] : 0);
      if (ld->type == F32) ((float *)d)[j * ld->ld + i] = sum;
      else ((uint16_t *)d)[j * ld->ld + i] = round16(sum);
    }
  return 0;
}
