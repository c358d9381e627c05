// Primitives of all kernels: the storage type T, reductions, 16-byte copies, tensor-core tiles.
//
// Device source without any #include: it is prepended to each kernel file and compiled by NVRTC. Under LL_EMU the same
// names have C++ bodies in tests/cuda/emulator/emu.h, so that the kernels' source runs on a CPU.
//
// Rules for the emulator: __shared__ arrays only inside kernels, dynamic shared memory only by LL_DYNAMIC_SHARED, warp
// functions with all 32 lanes, no early return before a barrier that other threads reach.

#ifndef LL_T
#error "LL_T is not set: 1 = bf16, 2 = f16"
#endif

typedef unsigned short T;  // the bits of a stored element

#define LL_FULL_WARP 0xffffffffu
#define LL_INFINITY __uint_as_float(0x7f800000u)

// 16 bytes that are loaded and stored at once.
struct __align__(16) Vec16 {
    unsigned v[4];
};

#ifndef LL_EMU

#define LL_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// Rounds to the nearest, ties to even. Numbers beyond the largest become infinity; NaN stays NaN.
__device__ __forceinline__ unsigned short f32_to_bf16(float x) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ unsigned short f32_to_f16(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float f16_to_f32(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// Rounds two numbers as from_f32 does, into one word and with one instruction.
__device__ __forceinline__ unsigned pack2(float low, float high) {
    unsigned word;
#if LL_T == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
    return word;
}

// 2^x within 2 ulp; results below 2^-126 are zero. One instruction; exp2f has three more for such small results.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned ll_shared_address(const void* p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

// Starts a copy of 16 bytes into shared memory, or of 16 zeros if not `valid`. Then `from` is not read, but must still
// be an address of the array. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async16(void* shared, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(ll_shared_address(shared)), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the N newest groups of this thread are in flight. Other threads see the copies after a barrier.
template <int N>
__device__ __forceinline__ void cp_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Four 8 x 8 matrices of T: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned); r[i] gets
// elements (l / 4, 2 (l % 4)) and the next of matrix i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ll_shared_address(shared))
                 : "memory");
}

// As ldmatrix_x4 of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ll_shared_address(shared))
                 : "memory");
}

// c[16 x 8] += a[16 x 16] . b[16 x 8], of T, with f32 sums. With g = lane / 4 and t = 2 (lane % 4), two elements per
// word: a = (g, t) (g + 8, t) (g, t + 8) (g + 8, t + 8); b = (t, g) (t + 8, g); c = (g, t) (g, t + 1) (g + 8, t) (g +
// 8, t + 1). Source: PTX ISA, "Matrix fragments for mma.m16n8k16".
__device__ __forceinline__ void mma_16816(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if LL_T == 1
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif  // LL_EMU

// Addresses are multiples of 16.
__device__ __forceinline__ Vec16 load16(const void* from) { return *(const Vec16*)from; }

__device__ __forceinline__ void store16(void* to, Vec16 x) { *(Vec16*)to = x; }

__device__ __forceinline__ float bf16_to_f32(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ float to_f32(T bits) {
#if LL_T == 1
    return bf16_to_f32(bits);
#else
    return f16_to_f32(bits);
#endif
}

__device__ __forceinline__ T from_f32(float x) {
#if LL_T == 1
    return f32_to_bf16(x);
#else
    return f32_to_f16(x);
#endif
}

// x rounded to T.
__device__ __forceinline__ float round_to_t(float x) { return to_f32(from_f32(x)); }

__device__ __forceinline__ void unpack8(Vec16 x, float (&out)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = to_f32((T)(x.v[i] & 0xffffu));
        out[2 * i + 1] = to_f32((T)(x.v[i] >> 16));
    }
}

__device__ __forceinline__ Vec16 pack8(const float (&x)[8]) {
    Vec16 out;
#pragma unroll
    for (int i = 0; i < 4; i++) out.v[i] = pack2(x[2 * i], x[2 * i + 1]);
    return out;
}

// --- reductions over a warp, and over a block of whole warps; `V` is float or an unsigned integer ---

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ unsigned long long larger(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

// Sum over the warp, in every lane; the order of additions is fixed.
template <class V> __device__ __forceinline__ V warp_sum(V x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(LL_FULL_WARP, x, mask);
    return x;
}

template <class V> __device__ __forceinline__ V warp_max(V x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = larger(x, __shfl_xor_sync(LL_FULL_WARP, x, mask));
    return x;
}

// Returns lane 0's `x` of warp number `lane`, or `other` beyond the last warp. `shared`: 32 numbers, which are free
// again after the call.
template <class V> __device__ __forceinline__ V of_warp(V x, V* shared, V other) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane < blockDim.x / 32 ? shared[lane] : other;
    __syncthreads();
    return x;
}

// Sum over the block, in every thread; `shared` as in of_warp.
template <class V> __device__ __forceinline__ V block_sum(V x, V* shared) {
    return warp_sum(of_warp(warp_sum(x), shared, V(0)));
}

// Maximum over the block, in every thread; `shared` as in of_warp.
template <class V> __device__ __forceinline__ V block_max(V x, V* shared) {
    x = warp_max(x);
    return warp_max(of_warp(x, shared, x));
}
