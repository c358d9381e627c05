// The work between the qkv product and attention: norms q and k (as Qwen3, if there are weights) and rotates them by
// position (arXiv:2104.09864, pairs (i, i + d/2)), q in place. Stores k and v in the row's cell.
//
// qkv [n_rows, (n_heads + 2 n_kv_heads) d]: q heads, k heads, v heads; q_norm, k_norm [d] f32, or NULL; cos, sin
// [n_positions, d/2] f32; positions [n_rows]; cells [n_rows]; keys, values [n_cells, n_kv_heads, d]. d is a multiple of
// 4, at most 256. A warp computes one head: a lane has two elements of its first half and their partners of the second.
// Padding rows write to cell 0, which no row reads; their positions are 0.
//
// Numerics: f32, rounded to T where transformers rounds: the normed value, its product with the weight, the result. The
// products of the rotation are not rounded one by one, unlike in transformers.

#define LL_HEADS_OF_A_BLOCK 8
#define LL_PAIRS 2  // words of a half per lane: d <= LL_PAIRS * 128

struct Head {
    float low[LL_PAIRS][2], high[LL_PAIRS][2];
};

__device__ __forceinline__ void ll_unpack2(unsigned word, float (&x)[2]) {
    x[0] = to_f32((T)(word & 0xffffu));
    x[1] = to_f32((T)(word >> 16));
}

__device__ __forceinline__ float ll_normed(float x, float inverse, float weight) {
    return round_to_t(round_to_t(x * inverse) * weight);
}

// RMS norm of the warp's head.
__device__ __forceinline__ void norm_head(Head& head, const float* weight, int d, float eps) {
    const int lane = threadIdx.x % 32;
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < LL_PAIRS; p++) {
#pragma unroll
        for (int k = 0; k < 2; k++) squares += head.low[p][k] * head.low[p][k] + head.high[p][k] * head.high[p][k];
    }
    const float inverse = 1.0f / sqrtf(warp_sum(squares) / (float)d + eps);
#pragma unroll
    for (int p = 0; p < LL_PAIRS; p++) {
        const int i = (p * 32 + lane) * 2;
        if (i < d / 2) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                head.low[p][k] = ll_normed(head.low[p][k], inverse, weight[i + k]);
                head.high[p][k] = ll_normed(head.high[p][k], inverse, weight[d / 2 + i + k]);
            }
        }
    }
}

__device__ __forceinline__ void rotate_head(Head& head, const float* cos, const float* sin, int d) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < LL_PAIRS; p++) {
        const int i = (p * 32 + lane) * 2;
        if (i < d / 2) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float a = head.low[p][k], b = head.high[p][k], c = cos[i + k], s = sin[i + k];
                head.low[p][k] = a * c - b * s;
                head.high[p][k] = b * c + a * s;
            }
        }
    }
}

__device__ __forceinline__ void load_head(Head& head, const T* from, int d) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < LL_PAIRS; p++) {
        const int i = (p * 32 + lane) * 2;
        const bool inside = i < d / 2;
        ll_unpack2(inside ? *(const unsigned*)(from + i) : 0u, head.low[p]);
        ll_unpack2(inside ? *(const unsigned*)(from + d / 2 + i) : 0u, head.high[p]);
    }
}

__device__ __forceinline__ void store_head(const Head& head, T* to, int d) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < LL_PAIRS; p++) {
        const int i = (p * 32 + lane) * 2;
        if (i < d / 2) {
            *(unsigned*)(to + i) = pack2(head.low[p][0], head.low[p][1]);
            *(unsigned*)(to + d / 2 + i) = pack2(head.high[p][0], head.high[p][1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) rope_kv_store(
    T* __restrict__ qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
    const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ positions,
    const unsigned* __restrict__ cells, T* __restrict__ keys, T* __restrict__ values, int n_heads, int n_kv_heads, int d,
    float eps) {
    const int h = blockIdx.y * LL_HEADS_OF_A_BLOCK + threadIdx.x / 32;
    if (h >= n_heads + 2 * n_kv_heads) return;  // whole warps; the block has no barrier
    const size_t row = blockIdx.x;
    T* from = qkv + (row * (n_heads + 2 * n_kv_heads) + h) * d;
    Head head;
    load_head(head, from, d);
    const bool is_q = h < n_heads, is_v = h >= n_heads + n_kv_heads;
    if (!is_v) {
        const float* norm = is_q ? q_norm : k_norm;
        if (norm) norm_head(head, norm, d, eps);
        const size_t angles = (size_t)positions[row] * (d / 2);
        rotate_head(head, cos + angles, sin + angles, d);
    }
    const int kv_head = h - n_heads - (is_v ? n_kv_heads : 0);
    T* cell = (is_v ? values : keys) + ((size_t)cells[row] * n_kv_heads + kv_head) * d;
    store_head(head, is_q ? from : cell, d);
}

// Rotates the stored keys of cells whose positions change by one distance. cells [n_cells], all different; cos, sin
// [d/2] f32, of the distance. The result is rounded to T.
extern "C" __global__ void __launch_bounds__(256) rope_shift(T* __restrict__ keys, const unsigned* __restrict__ cells,
                                                             const float* __restrict__ cos,
                                                             const float* __restrict__ sin, int n_kv_heads, int d) {
    const int h = blockIdx.y * LL_HEADS_OF_A_BLOCK + threadIdx.x / 32;
    if (h >= n_kv_heads) return;
    T* at = keys + ((size_t)cells[blockIdx.x] * n_kv_heads + h) * d;
    Head head;
    load_head(head, at, d);
    rotate_head(head, cos, sin, d);
    store_head(head, at, d);
}
