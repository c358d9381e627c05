// Rounds n numbers to T with the functions of prim.cuh, one number per thread: to the nearest, ties to even.

extern "C" __global__ void __launch_bounds__(256) convert_f32(const float* __restrict__ from, T* __restrict__ to,
                                                              unsigned long long n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) to[i] = from_f32(from[i]);
}

extern "C" __global__ void __launch_bounds__(256) convert_bf16(const unsigned short* __restrict__ from,
                                                               T* __restrict__ to, unsigned long long n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) to[i] = from_f32(bf16_to_f32(from[i]));
}

extern "C" __global__ void __launch_bounds__(256) convert_f16(const unsigned short* __restrict__ from,
                                                              T* __restrict__ to, unsigned long long n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) to[i] = from_f32(f16_to_f32(from[i]));
}
