// CUDA's built-in functions, and the PTX functions of prim.cuh, for emu.h.
#pragma once

#define LL_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(LL_AT) { emu::wait(emu::block_barrier, "__syncthreads", file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, LL_AT) {
    emu::full_warp(mask, "__syncwarp");
    emu::wait(emu::warp(), "__syncwarp", file, line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
__attribute__((noreturn)) inline void __trap() { emu::fail("__trap()"); }

// The votes of a block, in two sets as for exchange().
inline const int* ll_votes(int mine, const char* what, const char* file, int line) {
    int* all = emu::votes[emu::block_barrier.generation & 1];
    all[emu::current] = mine != 0;
    emu::wait(emu::block_barrier, what, file, line);
    return all;
}
inline int __syncthreads_count(int mine, LL_AT) {
    const int* all = ll_votes(mine, "__syncthreads_count", file, line);
    int n = 0;
    for (unsigned i = 0; i < emu::n_threads; i++) n += all[i];
    return n;
}
inline int __syncthreads_or(int mine, LL_AT) { return __syncthreads_count(mine, file, line) != 0; }
inline int __syncthreads_and(int mine, LL_AT) { return __syncthreads_count(mine, file, line) == (int)emu::n_threads; }

// As in CUDA, a lane gets its own value if the source is outside of the warp, or outside of its group of `width` lanes.
template <class V> V __shfl_sync(unsigned mask, V mine, int from, int width = 32, LL_AT) {
    emu::full_warp(mask, "__shfl_sync");
    unsigned base = emu::lane() / width * width;
    return emu::of_lane<V>(emu::exchange(mine, "__shfl_sync", file, line), base + (unsigned)from % width);
}
template <class V> V __shfl_xor_sync(unsigned mask, V mine, int bits, int width = 32, LL_AT) {
    emu::full_warp(mask, "__shfl_xor_sync");
    unsigned lane = emu::lane(), from = lane ^ bits;
    return emu::of_lane<V>(emu::exchange(mine, "__shfl_xor_sync", file, line), from / width <= lane / width ? from : lane);
}
template <class V> V __shfl_down_sync(unsigned mask, V mine, unsigned n, int width = 32, LL_AT) {
    emu::full_warp(mask, "__shfl_down_sync");
    unsigned lane = emu::lane(), from = lane % width + n < (unsigned)width ? lane + n : lane;
    return emu::of_lane<V>(emu::exchange(mine, "__shfl_down_sync", file, line), from);
}
template <class V> V __shfl_up_sync(unsigned mask, V mine, unsigned n, int width = 32, LL_AT) {
    emu::full_warp(mask, "__shfl_up_sync");
    unsigned lane = emu::lane(), from = lane % width >= n ? lane - n : lane;
    return emu::of_lane<V>(emu::exchange(mine, "__shfl_up_sync", file, line), from);
}
inline unsigned __ballot_sync(unsigned mask, int mine, LL_AT) {
    emu::full_warp(mask, "__ballot_sync");
    const emu::Slot* all = emu::exchange(mine, "__ballot_sync", file, line);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++) bits |= (unsigned)(emu::of_lane<int>(all, i) != 0) << i;
    return bits;
}
inline int __any_sync(unsigned mask, int mine, LL_AT) { return __ballot_sync(mask, mine, file, line) != 0; }
inline int __all_sync(unsigned mask, int mine, LL_AT) { return __ballot_sync(mask, mine, file, line) == ~0u; }

#define LL_REDUCE(name, expression)                                                    \
    template <class V> V name(unsigned mask, V mine, LL_AT) {                          \
        emu::full_warp(mask, #name);                                                   \
        const emu::Slot* all = emu::exchange(mine, #name, file, line);                 \
        V a = emu::of_lane<V>(all, 0);                                                 \
        for (unsigned i = 1; i < 32; i++) {                                            \
            V b = emu::of_lane<V>(all, i);                                             \
            a = (expression);                                                          \
        }                                                                              \
        return a;                                                                      \
    }
LL_REDUCE(__reduce_add_sync, a + b)
LL_REDUCE(__reduce_min_sync, b < a ? b : a)
LL_REDUCE(__reduce_max_sync, a < b ? b : a)
LL_REDUCE(__reduce_or_sync, a | b)
LL_REDUCE(__reduce_and_sync, a & b)

// Only one thread runs at a time, so plain reads and writes are atomic.
#define LL_ATOMIC(name, expression)                       \
    template <class V> V name(V* at, ll_same<V> given) {  \
        V old = *at;                                      \
        *at = (expression);                               \
        return old;                                       \
    }
template <class V> struct ll_identity { typedef V type; };
template <class V> using ll_same = typename ll_identity<V>::type;
LL_ATOMIC(atomicAdd, (V)(old + given))
LL_ATOMIC(atomicSub, (V)(old - given))
LL_ATOMIC(atomicExch, given)
LL_ATOMIC(atomicMin, given < old ? given : old)
LL_ATOMIC(atomicMax, old < given ? given : old)
LL_ATOMIC(atomicOr, (V)(old | given))
LL_ATOMIC(atomicAnd, (V)(old & given))
LL_ATOMIC(atomicXor, (V)(old ^ given))
template <class V> V atomicCAS(V* at, ll_same<V> expected, ll_same<V> given) {
    V old = *at;
    if (old == expected) *at = given;
    return old;
}

template <class To, class From> To ll_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits of another size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(unsigned x) { return ll_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return ll_bits<unsigned>(x); }
inline float __int_as_float(int x) { return ll_bits<float>(x); }
inline int __float_as_int(float x) { return ll_bits<int>(x); }
inline double __longlong_as_double(long long x) { return ll_bits<double>(x); }
inline long long __double_as_longlong(double x) { return ll_bits<long long>(x); }
inline float ll_rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define rsqrtf ll_rsqrtf  // newer C libraries have the name
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
template <class V> V __ldg(const V* at) { return *at; }
template <class V> V min(V x, ll_same<V> y) { return y < x ? y : x; }
template <class V> V max(V x, ll_same<V> y) { return x < y ? y : x; }

// --- the functions that prim.cuh has in PTX ---

inline unsigned short f32_to_bf16(float x) {
    unsigned u = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float f16_to_f32(unsigned short bits) {
    unsigned sign = (unsigned)(bits & 0x8000) << 16, rest = (unsigned)(bits & 0x7fff) << 13;
    if (rest >= 0x0f800000) return __uint_as_float(sign | 0x7f800000 | rest);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest) * 0x1p112f));
}
inline unsigned short f32_to_f16(float x) {
    unsigned sign = __float_as_uint(x) >> 16 & 0x8000, u = __float_as_uint(x) & 0x7fffffff;
    if (x != x) return 0x7fff;
    if (u >= 0x477ff000) return (unsigned short)(sign | 0x7c00);
    // Below the smallest normal number, the sum with 1/2 is rounded to the last place of an f16.
    if (u < 0x38800000) return (unsigned short)(sign | (__float_as_uint(__uint_as_float(u) + 0.5f) - 0x3f000000));
    return (unsigned short)(sign | ((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13));
}

inline unsigned pack2(float low, float high) {
#if LL_T == 1
    return f32_to_bf16(low) | (unsigned)f32_to_bf16(high) << 16;
#else
    return f32_to_f16(low) | (unsigned)f32_to_f16(high) << 16;
#endif
}
inline float fast_exp2(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

// The copy runs when it is waited for. Until then its target is NaN.
inline void cp_async16(void* shared, const void* from, bool valid) {
    emu::aligned16(shared, "cp_async16");
    emu::aligned16(from, "cp_async16");
    if (!emu::in_shared(shared, 16)) emu::fail("cp_async16 to %p, which is not shared memory", shared);
    emu::Fiber& f = *emu::fibers[emu::current];
    if (f.n_copies == emu::MAX_COPIES) emu::fail("more than %zu pending copies", emu::MAX_COPIES);
    if (valid) (void)*(const volatile char*)from;
    memset(shared, 0xff, 16);
    f.copies[f.n_copies++] = {shared, from, valid, f.group};
}
inline void cp_commit() { emu::fibers[emu::current]->group++; }
template <int N> void cp_wait() {
    emu::Fiber& f = *emu::fibers[emu::current];
    unsigned kept = 0;
    for (unsigned i = 0; i < f.n_copies; i++) {
        emu::Copy& c = f.copies[i];
        if (c.group + N >= f.group) {
            f.copies[kept++] = c;
        } else if (c.valid) {
            memcpy(c.to, c.from, 16);
        } else {
            memset(c.to, 0, 16);
        }
    }
    f.n_copies = kept;
}

struct ll_row { unsigned short x[8]; };
inline const emu::Slot* ll_rows(const void* shared, const char* file, int line) {
    emu::aligned16(shared, "ldmatrix");
    if (!emu::in_shared(shared, 16)) emu::fail("ldmatrix of %p, which is not shared memory", shared);
    ll_row mine;
    memcpy(&mine, shared, 16);
    return emu::exchange(mine, "ldmatrix", file, line);
}
inline void ldmatrix_x4(unsigned (&r)[4], const void* shared, LL_AT) {
    const emu::Slot* all = ll_rows(shared, file, line);
    unsigned lane = emu::lane();
    for (unsigned i = 0; i < 4; i++) {
        ll_row row = emu::of_lane<ll_row>(all, 8 * i + lane / 4);
        r[i] = row.x[2 * (lane % 4)] | (unsigned)row.x[2 * (lane % 4) + 1] << 16;
    }
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared, LL_AT) {
    const emu::Slot* all = ll_rows(shared, file, line);
    unsigned lane = emu::lane();
    for (unsigned i = 0; i < 4; i++) {
        ll_row low = emu::of_lane<ll_row>(all, 8 * i + 2 * (lane % 4));
        ll_row high = emu::of_lane<ll_row>(all, 8 * i + 2 * (lane % 4) + 1);
        r[i] = low.x[lane / 4] | (unsigned)high.x[lane / 4] << 16;
    }
}

inline float ll_element(unsigned short bits) {
#if LL_T == 1
    return __uint_as_float((unsigned)bits << 16);
#else
    return f16_to_f32(bits);
#endif
}
struct ll_fragments { float a[4][2], b[2][2]; };
inline void mma_16816(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], LL_AT) {
    ll_fragments mine;
    for (int i = 0; i < 4; i++) {
        for (int h = 0; h < 2; h++) mine.a[i][h] = ll_element((unsigned short)(a[i] >> 16 * h));
    }
    for (int i = 0; i < 2; i++) {
        for (int h = 0; h < 2; h++) mine.b[i][h] = ll_element((unsigned short)(b[i] >> 16 * h));
    }
    const emu::Slot* all = emu::exchange(mine, "mma_16816", file, line);
    unsigned g = emu::lane() / 4, n = 2 * (emu::lane() % 4);
    double sums[4] = {c[0], c[1], c[2], c[3]};
    for (unsigned j = 0; j < 4; j++) {
        const ll_fragments& rows = *(const ll_fragments*)all[4 * g + j].bytes;
        const ll_fragments& left = *(const ll_fragments*)all[4 * n + j].bytes;
        const ll_fragments& right = *(const ll_fragments*)all[4 * (n + 1) + j].bytes;
        for (int h = 0; h < 2; h++) {
            for (int k = 0; k < 2; k++) {
                double upper = rows.a[2 * k][h], lower = rows.a[2 * k + 1][h];
                sums[0] += upper * left.b[k][h];
                sums[1] += upper * right.b[k][h];
                sums[2] += lower * left.b[k][h];
                sums[3] += lower * right.b[k][h];
            }
        }
    }
    for (int i = 0; i < 4; i++) c[i] = (float)sums[i];
}
