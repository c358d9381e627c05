// Products of up to 8 rows with a weight: out[m, n] = x[m, k] . weight[n, k]^T (+ bias[n]).
//
// The weight is read once, which bounds the time, so enough of its bytes must be in flight. The tensor cores compute
// the products even for one row: a thread loads 16 bytes of weight and uses them without unpacking, and the product
// includes the sums over the warp. The order of k within a product is free if both operands have the same order. mma
// expects elements 2t, 2t + 1, 2t + 8, 2t + 9 of sixteen in thread t; it gets the adjacent elements in the thread's 16
// bytes.
//
// The warps of a block take turns of 64 elements of k (128 bytes, a cache line) of its 16 rows, so that enough bytes
// are in flight even with few rows of weight. x is read from the caches, because a block needs each element of it once.
//
// Numerics: products of T are summed in f32. The warps' sums and the bias are added in f32, and the result is rounded
// to T once (or not at all). A row's result depends only on the row: other rows do not change the order of additions.

// A block computes 16 rows of the weight. Its eight warps share k, and their sums are added in order at the end.
constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int MAX_M = 8;
constexpr int STRIDE = ROWS + 1;

// Weights are read once, so they bypass the L1 cache, which keeps x.
__device__ __forceinline__ Vec16 load16_once(const void* from) {
#ifdef LL_EMU
    return load16(from);
#else
    Vec16 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3])
                 : "l"(__cvta_generic_to_global(from)));
    return x;
#endif
}

// Adds the sums of the block's warps and calls `store` with the place in [m, n] and the sum, for rows of x and of the
// weight that exist.
template <class Store>
__device__ __forceinline__ void finish(const float (&c)[4], int n_rows, int m, const T* bias, Store store) {
    __shared__ float sums[WARPS][MAX_M * STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][(lane % 4 * 2 + i % 2) * STRIDE + lane / 4 + i / 2 * 8] = c[i];
    __syncthreads();
    const int row = threadIdx.x / ROWS, column = threadIdx.x % ROWS;
    const int n = blockIdx.x * ROWS + column;
    if (row >= m || n >= n_rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w][row * STRIDE + column];
    if (bias) sum += to_f32(bias[n]);
    store((size_t)row * n_rows + n, sum);
}

// Elements of k of a warp's turn.
constexpr int TURN = 64;

// c[16 rows of weight, 8 rows of x] += the products of 32 elements of k. Each thread has 8 of them, of two rows of the
// weight and of one row of x.
__device__ __forceinline__ void add_32(float (&c)[4], const Vec16& upper, const Vec16& lower, const Vec16& x) {
    mma_16816(c, {upper.v[0], lower.v[0], upper.v[1], lower.v[1]}, {x.v[0], x.v[1]});
    mma_16816(c, {upper.v[2], lower.v[2], upper.v[3], lower.v[3]}, {x.v[2], x.v[3]});
}

// x [m, k] with 1 <= m <= 8 and k a multiple of 8; weight [n, k]; bias [n] or null; `store` takes [m, n]; grid:
// ceil(n / 16).
template <class Store>
__device__ __forceinline__ void gemv_rows(const T* x, const T* weight, const T* bias, int m, int n_rows, int k,
                                          Store store) {
    // Turns whose loads are in flight at once. With two blocks on an SM that is 128 KB, several times what memory
    // needs.
    constexpr int DEPTH = 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x_row = lane / 4;
    // Rows behind the last, of the weight and of x, read another row, and their results are dropped.
    const int row = (int)blockIdx.x * ROWS + lane / 4;
    const T* upper = weight + (size_t)min(row, n_rows - 1) * k;
    const T* lower = weight + (size_t)min(row + 8, n_rows - 1) * k;
    x += (size_t)(x_row < m ? x_row : 0) * k;
    float c[4] = {};
    for (int turn = warp * TURN; turn < k; turn += DEPTH * WARPS * TURN) {
        Vec16 a[DEPTH][2] = {}, b[DEPTH][2] = {}, right[DEPTH][2] = {};
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int of_d = turn + d * WARPS * TURN;
            if (of_d >= k) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = of_d + half * 32 + lane % 4 * 8, from = at < k ? at : 0;
                a[d][half] = load16_once(upper + from);
                b[d][half] = load16_once(lower + from);
                right[d][half] = load16(x + from);
            }
        }
        // Nothing above uses a loaded value, because that would wait between the loads.
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (turn + d * WARPS * TURN + half * 32 + lane % 4 * 8 >= k) right[d][half] = Vec16{};
                add_32(c, a[d][half], b[d][half], right[d][half]);
            }
    }
    finish(c, n_rows, m, bias, store);
}

extern "C" __global__ void __launch_bounds__(256, 2) gemv(const T* x, const T* weight, const T* bias, T* out, int m,
                                                          int n_rows, int k) {
    gemv_rows(x, weight, bias, m, n_rows, k, [&](size_t place, float sum) { out[place] = from_f32(sum); });
}

// The same with an f32 result, for logits.
extern "C" __global__ void __launch_bounds__(256, 2) gemv_f32(const T* x, const T* weight, const T* bias, float* out,
                                                              int m, int n_rows, int k) {
    gemv_rows(x, weight, bias, m, n_rows, k, [&](size_t place, float sum) { out[place] = sum; });
}
