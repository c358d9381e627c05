// What the products of few rows share: one block does 16 rows of the weight, its eight warps share out k and are added
// in their order at the end.

constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int MAX_M = 8;
constexpr int STRIDE = ROWS + 1;

// Weights are read once: they pass by the nearest cache, which x and the cells' lists need more.
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

// Sums of the block's warps to `store(m, n, sum)`, for rows m of x and n of the weight that there are.
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
