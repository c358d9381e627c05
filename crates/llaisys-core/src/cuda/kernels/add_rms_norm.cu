// Adds a branch to the residual stream and computes the RMS norm of the sum (arXiv:1910.07467).
//
// residual, x, out [n_rows, width], width a multiple of 8; weight [width] f32. x may be NULL: then nothing is added.
// One block per row, which stays in registers.
//
// Numerics, as in transformers: residual + x is rounded to T. The mean square, the root and the quotient are in f32.
// The quotient is rounded to T, and so is its product with the weight.

#define LL_MAX_CHUNKS 8  // 16-byte pieces of a row per thread

extern "C" __global__ void __launch_bounds__(256) add_rms_norm(T* __restrict__ residual, const T* x,
                                                               const float* __restrict__ weight, T* out,
                                                               int width, float eps) {
    __shared__ float shared[32];
    const size_t start = (size_t)blockIdx.x * width;
    Vec16 row[LL_MAX_CHUNKS];
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < LL_MAX_CHUNKS; c++) {
        const int i = (c * blockDim.x + threadIdx.x) * 8;
        if (i < width) {
            float values[8];
            row[c] = load16(residual + start + i);
            unpack8(row[c], values);
            if (x) {
                float branch[8];
                unpack8(load16(x + start + i), branch);
#pragma unroll
                for (int k = 0; k < 8; k++) values[k] = round_to_t(values[k] + branch[k]);
                row[c] = pack8(values);
                store16(residual + start + i, row[c]);
            }
#pragma unroll
            for (int k = 0; k < 8; k++) squares += values[k] * values[k];
        }
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, shared) / (float)width + eps);
#pragma unroll
    for (int c = 0; c < LL_MAX_CHUNKS; c++) {
        const int i = (c * blockDim.x + threadIdx.x) * 8;
        if (i < width) {
            float values[8];
            unpack8(row[c], values);
            const float4 low = *(const float4*)(weight + i), high = *(const float4*)(weight + i + 4);
            const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int k = 0; k < 8; k++) values[k] = round_to_t(values[k] * inverse) * w[k];
            store16(out + start + i, pack8(values));
        }
    }
}
