// The common part of both attention kernels, for a warp's 16 query rows and some keys in shared memory: flash attention
// (arXiv:2307.08691) with mma.sync.
//
// Numerics: products of T are summed in f32. Softmax is in f32, with a running maximum and powers of two that include
// the scale. Weights are rounded to T before they are multiplied by V; their sum is that of the unrounded weights.

constexpr int D = LL_D;
// Elements between rows in shared memory: an odd multiple of 16 bytes for every D, so that the eight rows that
// ldmatrix reads at once are in different banks.
constexpr int STRIDE = D + 8;
// 16-byte pieces of a head.
constexpr int CHUNKS = D / 8;
constexpr unsigned NO_CELL = 0xffffffffu;
// The score of a hidden key: far below FLOOR, so that its weight is zero even before the first visible key.
constexpr float UNSEEN = -3.0e38f;
// The running maximum before the first key: finite, so that the first key needs no branch.
constexpr float FLOOR = -1.0e30f;

// A thread's state for two rows of its warp, lane / 4 and lane / 4 + 8: the largest exponent so far, the sum of the
// thread's own weights, and the weighted values in columns lane % 4 * 2 and the next of every 8.
struct Rows {
    float max[2] = {FLOOR, FLOOR}, sum[2] = {0.0f, 0.0f}, o[D / 8][4] = {};
};

// s = q . k^T for 16 N keys: s[n] has keys 8n + lane % 4 * 2 and the next.
template <int N>
__device__ __forceinline__ void scores(float (&s)[2 * N][4], const unsigned (&q)[D / 16][4], const T* k, int lane) {
    // Each lane addresses a row of one of the four 8 x 8 matrices: keys 0-7 and 8-15, columns 0-7 and 8-15 of each.
    const T* from = k + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < 2 * N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 16; ++c)
#pragma unroll
        for (int n = 0; n < N; ++n) {
            unsigned b[4];
            ldmatrix_x4(b, from + n * 16 * STRIDE + c * 16);
            mma_16816(s[2 * n], q[c], {b[0], b[1]});
            mma_16816(s[2 * n + 1], q[c], {b[2], b[3]});
        }
}

// Hides all keys of row r (0 or 1) of a thread except `first .. last`, counted from the thread's first key.
template <int N>
__device__ __forceinline__ void hide(float (&s)[2 * N][4], int r, int first, int last) {
#pragma unroll
    for (int n = 0; n < 2 * N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (n * 8 + i < first || n * 8 + i >= last) s[n][2 * r + i] = UNSEEN;
}

// The online softmax: turns scores into weights relative to the new maximum, and scales the previous sums to it.
// scale_log2 turns scores into exponents of two.
template <int N>
__device__ __forceinline__ void to_weights(unsigned (&p)[N][4], Rows& rows, const float (&s)[2 * N][4],
                                           float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float highest = UNSEEN;
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) highest = fmaxf(highest, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(LL_FULL_WARP, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(LL_FULL_WARP, highest, 2));
        const float now = fmaxf(rows.max[r], highest * scale_log2), factor = fast_exp2(rows.max[r] - now);
        rows.max[r] = now;
        rows.sum[r] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) {
            const float w0 = fast_exp2(fmaf(s[n][2 * r], scale_log2, -now));
            const float w1 = fast_exp2(fmaf(s[n][2 * r + 1], scale_log2, -now));
            rows.sum[r] += w0 + w1;
            // A thread's scores of two adjacent tiles are its fragment of A in the next product.
            p[n / 2][n % 2 * 2 + r] = pack2(w0, w1);
        }
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            rows.o[c][2 * r] *= factor;
            rows.o[c][2 * r + 1] *= factor;
        }
    }
}

// o += p . v for 16 N keys.
template <int N>
__device__ __forceinline__ void add_values(Rows& rows, const unsigned (&p)[N][4], const T* v, int lane) {
    const T* from = v + lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
            unsigned b[4];
            ldmatrix_x4_trans(b, from + n * 16 * STRIDE + c * 16);
            mma_16816(rows.o[2 * c], p[n], {b[0], b[1]});
            mma_16816(rows.o[2 * c + 1], p[n], {b[2], b[3]});
        }
}

// Adds the rows' sums of weights over all columns, in every thread that has a part of them.
__device__ __forceinline__ void finish_sums(Rows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(LL_FULL_WARP, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(LL_FULL_WARP, rows.sum[r], 2);
    }
}
