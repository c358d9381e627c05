// What both attention kernels do with a warp's 16 query rows and some keys in shared memory: flash attention
// (arXiv:2307.08691) on mma.sync.
//
// Numerics: products of T summed in f32; softmax in f32 by running maximum and powers of two with the scale folded in;
// weights rounded to T before they meet V (their sum is of unrounded ones).

constexpr int D = LL_D;
// Elements between rows in shared memory: an odd multiple of 16 bytes for every D, so that the eight rows that
// ldmatrix reads at once lie in different banks.
constexpr int STRIDE = D + 8;
// Pieces of 16 bytes of a head.
constexpr int CHUNKS = D / 8;
constexpr unsigned NO_CELL = 0xffffffffu;
// A score that is not seen; far below FLOOR, so that its weight is zero even where nothing is seen yet.
constexpr float UNSEEN = -3.0e38f;
// The running maximum before the first key: finite, so that "nothing yet" takes no branch.
constexpr float FLOOR = -1.0e30f;

// scale_log2 is what makes scores exponents of two. Where cap > 0 they are first bent to cap * tanh(score * cap_scale).
struct Scoring {
    float scale_log2, cap_scale, cap;
};

// What a thread keeps of two rows of its warp, lane / 4 and 8 below: the largest exponent so far, the sum of the
// thread's own weights, the weighted values in columns lane % 4 * 2 and the next of every 8.
struct Rows {
    float max[2] = {FLOOR, FLOOR}, sum[2] = {0.0f, 0.0f}, o[D / 8][4] = {};
};

// s = q . k^T for 16 N keys: s[n] has keys 8n + lane % 4 * 2 and the next.
template <int N>
__device__ __forceinline__ void scores(float (&s)[2 * N][4], const unsigned (&q)[D / 16][4], const T* k, int lane) {
    // Lane -> row of one of the four 8 x 8 matrices: keys 0-7 and 8-15, columns 0-7 and 8-15 of each.
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

template <int N>
__device__ __forceinline__ void bend(float (&s)[2 * N][4], const Scoring& scoring) {
    if (scoring.cap <= 0.0f) return;
#pragma unroll
    for (int n = 0; n < 2 * N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = scoring.cap * tanhf(s[n][i] * scoring.cap_scale);
}

// Leaves row r (0 or 1) of a thread with the scores of keys `first .. last`, counted from the thread's first one.
template <int N>
__device__ __forceinline__ void hide(float (&s)[2 * N][4], int r, int first, int last) {
#pragma unroll
    for (int n = 0; n < 2 * N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (n * 8 + i < first || n * 8 + i >= last) s[n][2 * r + i] = UNSEEN;
}

// The online softmax: scores become weights under the new maximum, and what there was is scaled down to it.
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
            // Where a thread has scores of two neighbouring tiles, the next product wants its part of A.
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

// The rows' sums of weights over all columns, in every thread that has a part of them.
__device__ __forceinline__ void finish_sums(Rows& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(LL_FULL_WARP, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(LL_FULL_WARP, rows.sum[r], 2);
    }
}
