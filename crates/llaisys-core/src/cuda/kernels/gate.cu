// The gate of the feed-forward network: out = f(gate) * up, with f = silu (arXiv:2002.05202, SwiGLU) or the tanh form
// of gelu (arXiv:1606.08415; GeGLU). LL_GATE: 0 = silu, 1 = gelu.
//
// gate_up [n_rows, 2 width]: gate, then up; out [n_rows, width]; width is a multiple of 8.
// Numerics: f is computed in f32 and rounded to T, as in transformers; the product is rounded again.

__device__ __forceinline__ float ll_gate(float x) {
#if LL_GATE == 0
    return x / (1.0f + expf(-x));
#else
    // x / 2 (1 + tanh u), in a form without cancellation.
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * u));
#endif
}

extern "C" __global__ void __launch_bounds__(256) gate(const T* __restrict__ gate_up, T* __restrict__ out, int width) {
    const int i = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (i >= width) return;
    const size_t row = blockIdx.x;
    float gates[8], ups[8];
    unpack8(load16(gate_up + row * 2 * width + i), gates);
    unpack8(load16(gate_up + row * 2 * width + width + i), ups);
#pragma unroll
    for (int k = 0; k < 8; k++) gates[k] = round_to_t(ll_gate(gates[k])) * ups[k];
    store16(out + row * width + i, pack8(gates));
}
