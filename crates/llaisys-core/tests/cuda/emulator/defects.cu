// Kernels with one defect each, and the correct form of some of them: tests of the emulator itself.
#define LL_ONE_WARP extern "C" __global__ void __launch_bounds__(32)
#define LL_BLOCK extern "C" __global__ void __launch_bounds__(128)

LL_ONE_WARP read_behind(const float* x, float* y, int n) { y[threadIdx.x] = x[threadIdx.x + n]; }

LL_ONE_WARP write_behind(float* y, int n) { y[(int)threadIdx.x + n] = 1.0f; }

// Each thread reads the next thread's number.
LL_BLOCK barrier_missing(float* y) {
    __shared__ float x[128];
    x[threadIdx.x] = (float)threadIdx.x;
    y[threadIdx.x] = x[(threadIdx.x + 1) % 128];
}

LL_BLOCK barrier_there(float* y) {
    __shared__ float x[128];
    x[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = x[(threadIdx.x + 1) % 128];
}

LL_ONE_WARP warp_barrier_missing(float* y) {
    __shared__ float x[32];
    x[threadIdx.x] = (float)threadIdx.x;
    y[threadIdx.x] = x[(threadIdx.x + 1) % 32];
}

LL_BLOCK blocks_depend(float* y) {
    if (threadIdx.x == 0) y[blockIdx.x] = blockIdx.x == 0 ? 1.0f : y[blockIdx.x - 1] + 1.0f;
}

LL_ONE_WARP shared_unwritten(float* y) {
    __shared__ float x[33];
    x[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = x[threadIdx.x + 1];
}

LL_ONE_WARP dynamic_unwritten(float* y) {
    LL_DYNAMIC_SHARED(bytes);
    y[threadIdx.x] = ((const float*)bytes)[threadIdx.x];
}

LL_ONE_WARP dynamic_behind(float* y) {
    LL_DYNAMIC_SHARED(bytes);
    float* x = (float*)bytes;
    x[threadIdx.x + 1] = 1.0f;
    y[threadIdx.x] = x[threadIdx.x];
}

LL_ONE_WARP index_outside(float* y, int n) {
    __shared__ float x[32];
    x[threadIdx.x + n] = 1.0f;
    y[threadIdx.x] = x[threadIdx.x];
}

LL_BLOCK barrier_of_some(float* y) {
    if (threadIdx.x < 64) __syncthreads();
    y[threadIdx.x] = 1.0f;
}

LL_BLOCK barriers_apart(float* y) {
    if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    y[threadIdx.x] = 1.0f;
}

LL_ONE_WARP shuffle_of_some(float* y) {
    float x = (float)threadIdx.x;
    if (threadIdx.x < 16) x = __shfl_xor_sync(LL_FULL_WARP, x, 1);
    y[threadIdx.x] = x;
}

LL_ONE_WARP shuffle_of_half(float* y) { y[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1); }

LL_ONE_WARP misaligned(const T* x, T* y) { store16(y + threadIdx.x * 8, load16(x + threadIdx.x * 8 + 1)); }

LL_ONE_WARP copy_unawaited(const T* x, T* y) {
    __shared__ __align__(16) T tile[32 * 8];
    cp_async16(tile + threadIdx.x * 8, x + threadIdx.x * 8, true);
    cp_commit();
    cp_wait<1>();
    store16(y + threadIdx.x * 8, load16(tile + threadIdx.x * 8));
}

LL_ONE_WARP copy_awaited(const T* x, T* y) {
    __shared__ __align__(16) T tile[32 * 8];
    cp_async16(tile + threadIdx.x * 8, x + threadIdx.x * 8, threadIdx.x % 2 == 0);
    cp_commit();
    cp_wait<0>();
    store16(y + threadIdx.x * 8, load16(tile + threadIdx.x * 8));
}

LL_ONE_WARP copy_to_nowhere(const T* x, T* y) { cp_async16(y + threadIdx.x * 8, x + threadIdx.x * 8, true); }

LL_ONE_WARP divides(int* y, int by) { y[threadIdx.x] = 7 / by; }

// c[16, 8] = a[16, 16] . b[8, 16]^T by ldmatrix and mma.
LL_ONE_WARP tile_product(const T* a, const T* b, float* c) {
    __shared__ __align__(16) T rows[16 * 24], columns[8 * 24], across[16 * 24];
    for (int i = threadIdx.x; i < 256; i += 32) rows[i / 16 * 24 + i % 16] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) columns[i / 16 * 24 + i % 16] = b[i];
    for (int i = threadIdx.x; i < 128; i += 32) across[i % 16 * 24 + i / 16] = b[i];
    for (int i = threadIdx.x; i < 128; i += 32) across[i % 16 * 24 + i / 16 + 8] = b[i];
    __syncthreads();
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    unsigned left[4], right[4], turned[4];
    ldmatrix_x4(left, rows + lane % 16 * 24 + lane / 16 * 8);
    ldmatrix_x4(right, columns + lane % 8 * 24 + lane / 8 % 2 * 8);
    ldmatrix_x4_trans(turned, across + lane % 16 * 24 + lane / 16 * 8);
    float sums[4] = {}, again[4] = {};
    mma_16816(sums, left, {right[0], right[1]});
    mma_16816(again, left, {turned[0], turned[1]});
    const unsigned places[4] = {g * 8u + t, g * 8u + t + 1, (g + 8) * 8u + t, (g + 8) * 8u + t + 1};
    for (int i = 0; i < 4; i++) c[places[i]] = sums[i] == again[i] ? sums[i] : LL_INFINITY;
}

// Sum and maximum of 128 numbers, in every thread.
LL_BLOCK reductions(const float* x, float* y) {
    __shared__ float shared[32];
    y[threadIdx.x] = block_sum(x[threadIdx.x], shared);
    y[threadIdx.x + 128] = block_max(x[threadIdx.x], shared);
}
