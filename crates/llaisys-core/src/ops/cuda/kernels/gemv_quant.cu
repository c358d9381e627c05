// Products of up to 8 rows with a weight in integers of 4 or 8 bits: out[m, n] = x[m, k] . w[n, k]^T (+ bias[n]), where
// w = scale * q + min, with q from 0 and a scale and a min for every 32 of k. And such a weight as numbers of T, for
// products of more rows.
//
// As in gemv.cu the products are left to the tensor cores. Four bits become a number of T without conversion: placed
// into the fraction of 128 (bf16) or 1024 (f16) they are that number plus q, exactly. What is too much, and the min,
// goes with the sum of x over the group, which the tensor cores give as a product with ones. Eight bits are two planes of
// four.
//
// Layout (`gemv_quant.rs` packs it): k in blocks of 128, rounded up, zeros with zero scale and min behind the end;
//   codes   [n][block][t: 4][plane: bits / 4, low first][group of the block: 4] words. A word has elements
//           8t .. 8t + 8 of its group: element e in bits 4 (e / 2) + 16 (e % 2) and up
//   scales  [n][block][group: 4] words: scale in the low half, min in the high one, f16
// so that a thread's 16 bytes of a plane are its part of four groups.
//
// Numerics: sums in f32. Taking 128 (1024) times the sum of x out of a group's product costs it up to 8 (11) of an f32's
// bits, which leaves more than T has.

constexpr int BLOCK = 128;
constexpr int GROUP = 32;
constexpr int GROUPS = BLOCK / GROUP;
constexpr int PLANES = LL_BITS / 4;
#if LL_T == 1
constexpr unsigned BIAS_BITS = 0x43004300u, ONES = 0x3f803f80u;
constexpr float BIAS = 128.0f;
#else
constexpr unsigned BIAS_BITS = 0x64006400u, ONES = 0x3c003c00u;
constexpr float BIAS = 1024.0f;
#endif

// Elements 2i and 2i + 1 of a word, each plus BIAS.
__device__ __forceinline__ unsigned biased(unsigned word, int i) { return (word >> 4 * i & 0x000f000fu) | BIAS_BITS; }

__device__ __forceinline__ float scale_of(unsigned word) { return f16_to_f32((unsigned short)(word & 0xffffu)); }

__device__ __forceinline__ float min_of(unsigned word) { return f16_to_f32((unsigned short)(word >> 16)); }

// What a thread has of a block of k: two rows of the weight, one of x.
struct Part {
    Vec16 codes[PLANES][2], scales[2], x[GROUPS];
};

// sums[16 rows of weight, 8 rows of x] += group u of the part.
__device__ __forceinline__ void add_group(float (&sums)[4], const Part& part, int u) {
    const unsigned left[2] = {part.x[u].v[0], part.x[u].v[1]}, right[2] = {part.x[u].v[2], part.x[u].v[3]};
    float of_x[4] = {}, of_codes[4] = {};
    mma_16816(of_x, {ONES, ONES, ONES, ONES}, left);
    mma_16816(of_x, {ONES, ONES, ONES, ONES}, right);
    float bias = 0.0f;
    // The high plane first: its sums times 16, and the low one's on top.
#pragma unroll
    for (int plane = PLANES - 1; plane >= 0; --plane) {
        const unsigned upper = part.codes[plane][0].v[u], lower = part.codes[plane][1].v[u];
#pragma unroll
        for (int i = 0; i < 4; ++i) of_codes[i] *= 16.0f;
        bias = bias * 16.0f + BIAS;
        mma_16816(of_codes, {biased(upper, 0), biased(lower, 0), biased(upper, 1), biased(lower, 1)}, left);
        mma_16816(of_codes, {biased(upper, 2), biased(lower, 2), biased(upper, 3), biased(lower, 3)}, right);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float scale = scale_of(part.scales[half].v[u]), min = min_of(part.scales[half].v[u]);
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
            sums[i] = fmaf(scale, fmaf(-bias, of_x[i], of_codes[i]), fmaf(min, of_x[i], sums[i]));
        }
    }
}

// x [m, k] with 1 <= m <= 8 and k a multiple of 32; bias [n] or null; `store` takes [m, n]; grid: ceil(n / 16).
template <class Store>
__device__ __forceinline__ void gemv_quant_rows(const T* x, const unsigned* codes, const unsigned* scales,
                                                const T* bias, int m, int n_rows, int k, Store store) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4, x_row = lane / 4;
    const int n_blocks = (k + BLOCK - 1) / BLOCK;
    // Rows behind the last are read as the last and dropped.
    const int row = (int)blockIdx.x * ROWS + lane / 4, rows[2] = {min(row, n_rows - 1), min(row + 8, n_rows - 1)};
    x += (size_t)(x_row < m ? x_row : 0) * k;
    float sums[4] = {};
    // As many loads on their way at once as registers hold.
#pragma unroll(LL_BITS == 8 ? 1 : 2)
    for (int block = warp; block < n_blocks; block += WARPS) {
        Part part;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const size_t at = (size_t)rows[half] * n_blocks + block;
#pragma unroll
            for (int plane = 0; plane < PLANES; ++plane) {
                part.codes[plane][half] = load16_once(codes + ((at * 4 + t) * PLANES + plane) * GROUPS);
            }
            part.scales[half] = load16(scales + at * GROUPS);
        }
#pragma unroll
        for (int u = 0; u < GROUPS; ++u) {
            const int at = block * BLOCK + u * GROUP + t * 8;
            part.x[u] = Vec16{};
            if (x_row < m && at < k) part.x[u] = load16(x + at);
        }
#pragma unroll
        for (int u = 0; u < GROUPS; ++u) add_group(sums, part, u);
    }
    finish(sums, n_rows, m, bias, store);
}

extern "C" __global__ void __launch_bounds__(256, 2) gemv_quant(const T* x, const unsigned* codes,
                                                                const unsigned* scales, const T* bias, T* out, int m,
                                                                int n_rows, int k) {
    gemv_quant_rows(x, codes, scales, bias, m, n_rows, k,
                    [&](size_t place, float sum) { out[place] = from_f32(sum); });
}

// The same with a result in f32: logits.
extern "C" __global__ void __launch_bounds__(256, 2) gemv_quant_f32(const T* x, const unsigned* codes,
                                                                    const unsigned* scales, const T* bias, float* out,
                                                                    int m, int n_rows, int k) {
    gemv_quant_rows(x, codes, scales, bias, m, n_rows, k, [&](size_t place, float sum) { out[place] = sum; });
}

// out[n, k] = the weight, each number rounded to T once; a thread does 8 numbers, grid: ceil(n k / 8 / 256).
extern "C" __global__ void __launch_bounds__(256) dequantize(const unsigned* codes, const unsigned* scales, T* out,
                                                             int n_rows, int k) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= (size_t)n_rows * (k / 8)) return;
    const int n_blocks = (k + BLOCK - 1) / BLOCK, chunk = (int)(i % (k / 8));
    const int u = chunk / 4 % GROUPS, t = chunk % 4;
    const size_t at = i / (k / 8) * n_blocks + chunk / (BLOCK / 8);
    const float scale = scale_of(scales[at * GROUPS + u]), min = min_of(scales[at * GROUPS + u]);
    float numbers[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        unsigned code = 0;
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const unsigned word = codes[((at * 4 + t) * PLANES + plane) * GROUPS + u];
            code |= (word >> (4 * (e / 2) + 16 * (e % 2)) & 15u) << 4 * plane;
        }
        numbers[e] = fmaf(scale, (float)code, min);
    }
    store16(out + i * 8, pack8(numbers));
}
