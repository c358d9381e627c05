// A fake cublasLt: plain loops in the stream's order compute D = A^T B + bias, column-major, with f32 sums. Products
// that LLAISYS does not use are refused. The signatures are those of cublasLt.h 13.0.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

extern "C" int cuLaunchHostFunc(void* stream, void (*call)(void*), void* data);

namespace {

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
struct Layout { int type; uint64_t rows, cols; int64_t ld; };
struct Desc { int transposed, epilogue, bias_type; const void* bias; };
// The bytes of workspace, and the mask of reduction schemes.
struct Preference { size_t workspace; uint32_t reductions; };
struct Product { Desc desc; Layout a, b, d; const void *at_a, *at_b; void* at_d; };
const size_t WORKSPACE = 32u << 20;
int n_heuristics;

float of_bits(uint32_t word) {
    float x;
    memcpy(&x, &word, 4);
    return x;
}
uint32_t bits(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    return word;
}

float read(int type, const void* from, size_t i) {
    if (type == F32) return ((const float*)from)[i];
    uint16_t half = ((const uint16_t*)from)[i];
    if (type == BF16) return of_bits((uint32_t)half << 16);
    return (float)((const _Float16*)from)[i];
}
void write(int type, void* to, size_t i, float x) {
    if (type == F32) {
        ((float*)to)[i] = x;
    } else if (type == F16) {
        ((_Float16*)to)[i] = (_Float16)x;
    } else {
        uint32_t word = bits(x);
        ((uint16_t*)to)[i] = x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
}

// Eight sums at once, which a compiler vectorizes.
float dot(const float* x, const float* y, size_t n) {
    float sums[8] = {};
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) sums[j] += x[i + j] * y[i + j];
    }
    for (; i < n; i++) sums[0] += x[i] * y[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The product is never freed, because a graph may run it again.
void multiply(void* given) {
    const Product& p = *(const Product*)given;
    const size_t k = p.a.rows, m = p.b.cols;
    std::vector<float> right(k * m), left(k);
    for (size_t j = 0; j < m; j++) {
        for (size_t i = 0; i < k; i++) right[j * k + i] = read(p.b.type, p.at_b, j * p.b.ld + i);
    }
    for (size_t row = 0; row < p.a.cols; row++) {
        for (size_t i = 0; i < k; i++) left[i] = read(p.a.type, p.at_a, row * p.a.ld + i);
        const float bias = p.desc.epilogue == 4 ? read(p.desc.bias_type, p.desc.bias, row) : 0;
        for (size_t j = 0; j < m; j++) {
            write(p.d.type, p.at_d, j * p.d.ld + row, dot(left.data(), &right[j * k], k) + bias);
        }
    }
}

bool is_float(int type) { return type == F32 || type == F16 || type == BF16; }

}  // namespace

extern "C" {

int fake_heuristics() { return n_heuristics; }

size_t cublasLtGetVersion() { return 130000; }
int cublasLtCreate(void** handle) { return *handle = (void*)6, SUCCESS; }
int cublasLtDestroy(void* handle) { return SUCCESS; }
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = new Layout{type, rows, cols, ld};
    return is_float(type) && ld >= (int64_t)rows ? SUCCESS : INVALID_VALUE;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { return delete layout, SUCCESS; }
int cublasLtMatmulDescCreate(Desc** desc, int compute, int scale) {
    *desc = new Desc{};
    return compute == 68 && scale == F32 ? SUCCESS : NOT_SUPPORTED;
}
int cublasLtMatmulDescDestroy(Desc* desc) { return delete desc, SUCCESS; }
int cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* from, size_t n) {
    if (attribute == 3 && n == 4) return memcpy(&desc->transposed, from, n), SUCCESS;
    if (attribute == 7 && n == 4) return memcpy(&desc->epilogue, from, n), SUCCESS;
    if (attribute == 8 && n == 8) return memcpy(&desc->bias, from, n), SUCCESS;
    if (attribute == 26 && n == 4) return memcpy(&desc->bias_type, from, n), SUCCESS;
    return NOT_SUPPORTED;
}
int cublasLtMatmulPreferenceCreate(Preference** preference) { return *preference = new Preference{}, SUCCESS; }
int cublasLtMatmulPreferenceDestroy(Preference* preference) { return delete preference, SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* from, size_t n) {
    if (attribute == 1 && n == 8) return memcpy(&preference->workspace, from, n), SUCCESS;
    if (attribute == 3 && n == 4) return memcpy(&preference->reductions, from, n), SUCCESS;
    return NOT_SUPPORTED;
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Preference* preference, int wanted, void* results, int* n) {
    bool fits = desc->transposed == 1 && a->rows == b->rows && d->rows == a->cols && d->cols == b->cols && c == d &&
                a->type == b->type && a->type != F32 && (d->type == F32 || d->type == a->type) &&
                preference->workspace == WORKSPACE && preference->reductions == 2 &&
                (desc->epilogue == 0 || (desc->epilogue == 4 && desc->bias_type == a->type && d->type == a->type));
    n_heuristics++;
    // The algorithm's 64 bytes, the workspace's size, the state, the waves, and reserved words.
    memset(results, 0, 64 + 8 + 4 + 4 + 16);
    *n = fits;
    return SUCCESS;
}
int cublasLtMatmul(void* handle, Desc* desc, const float* alpha, const void* a, Layout* la, const void* b, Layout* lb,
                   const float* beta, const void* c, Layout* lc, void* d, Layout* ld, const void* algo,
                   void* workspace, size_t n_bytes, void* stream) {
    if (*alpha != 1 || *beta != 0 || c != d || !workspace || n_bytes != WORKSPACE || stream != (void*)2) {
        return INVALID_VALUE;
    }
    return cuLaunchHostFunc(stream, multiply, new Product{*desc, *la, *lb, *ld, a, b, d}) ? 13 : SUCCESS;
}

}  // extern "C"
