// From logits to tokens and their logprobs, by the rules of src/sample/sampler.rs and in their order; sample.rs says
// what each array holds. Three kernels: `sample_scan` reads each row once, with a block for each of its chunks;
// `sample_draw` ends the row in one block; `sample_logprobs` runs where a row asks for them.
//
// Numerics: a weight is exp2(-distance) in f32, `distance` being how far a logit lies below the best one in scaled
// logits times log2(e), and is counted in whole units of 2^-44. Sums of units are sums of integers, so neither the
// order of threads nor that of blocks shows. The CPU's weights are f64; a draw differs from its where the uniform number
// is within the rounding (1e-6) of a boundary of the cumulative distribution. Order among logits is exact, ties by id.

#define LL_CHUNK 4096     // logits of a block of sample_scan
#define LL_MAX_CHUNKS 128
#define LL_SCAN_THREADS 256
#define LL_DRAW_THREADS 512
#define LL_BINS 2048
#define LL_IN_FLIGHT 4
#define LL_MAX_TOP 20
#define LL_NONE 0xffffffffu
#define LL_UNITS 17592186044416.0f  // 2^44: 2^19 weights of at most 1 fit a u64
#define LL_IN_PROMPT 0x80000000u
#define LL_LEAST_KEY 0x00800000u  // order_key of the least finite number
#define LL_NEGLIGIBLE -40.0       // as on the CPU

typedef unsigned long long u64;

#define LL_ACTIVE 1u
#define LL_GREEDY 2u
#define LL_PENALTIES 4u

// Written by sample_tables.rs, word by word.
struct SampleParams {
    double inv_temperature;
    u64 seed;
    float scale_high, scale_low;  // log2(e) / temperature
    float top_p, min_p, typical_p;
    float repetition, presence, frequency;
    unsigned flags, choice, top_k, n_prompt;
    unsigned n_top, n_prompt_top;  // logprobs wanted, LL_NONE: none
    unsigned mask, allowed;        // rows of the table of masks
    unsigned first_edit, n_edits;
};
struct Edit {
    unsigned id;
    float bias;
    unsigned until;  // for positions below this
    unsigned word;   // if the answer ends with words[word + 1 ..][.. words[word]]
};
struct RowResult {
    unsigned id, outcome;
    float logprob;
    unsigned rank;
};
struct TopEntry {
    unsigned id;
    float logprob;
};

static_assert(sizeof(SampleParams) == 88 && sizeof(Edit) == 16 && sizeof(RowResult) == 16 && sizeof(TopEntry) == 8,
              "sample.rs and sample_tables.rs count on these");

// What sample_scan leaves of a chunk. Masses are in units, relative to the chunk's own maximum.
struct ChunkStat {
    u64 best;  // pack(logit, id) of the largest edited logit
    u64 mass;
    u64 raw_mass;
    float raw_max;
    unsigned bad;
};

#define LL_TOKEN 0u
#define LL_NON_FINITE 1u
#define LL_ALL_MASKED 2u
#define LL_IDLE 3u

// --- order and weight of a logit ---

// Integers in the order of the floats; both zeros have one key.
__device__ __forceinline__ unsigned order_key(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float of_key(unsigned key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// The largest is the largest logit, of equal ones that with the lowest id.
__device__ __forceinline__ u64 pack(float logit, unsigned id) { return (u64)order_key(logit) << 32 | (id ^ LL_NONE); }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

struct Scale {
    float best, high, low;
};

// Non-decreasing as the logit falls; large where it is -inf.
__device__ __forceinline__ float distance(Scale s, float logit) {
    const float d = s.best - logit;
    return fminf(fmaf(d, s.high, d * s.low), 1e30f);
}

__device__ __forceinline__ u64 units(float distance) { return (u64)(exp2f(-distance) * LL_UNITS); }

// --- over a block of whole warps; `shared`: 32 numbers, free again when these return ---

__device__ __forceinline__ u64 warp_sum_u64(u64 x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(LL_FULL_WARP, x, mask);
    return x;
}

__device__ __forceinline__ u64 block_sum_u64(u64 x, u64* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    x = warp_sum_u64(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum_u64(lane < n_warps ? shared[lane] : 0);
    __syncthreads();
    return x;
}

__device__ __forceinline__ u64 warp_max_u64(u64 x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        const u64 other = __shfl_xor_sync(LL_FULL_WARP, x, mask);
        x = other > x ? other : x;
    }
    return x;
}

__device__ __forceinline__ u64 block_max_u64(u64 x, u64* shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    x = warp_max_u64(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_max_u64(lane < n_warps ? shared[lane] : 0);
    __syncthreads();
    return x;
}

// Lays the threads' `own` one after the other: true in the thread in whose span `target` lies. `before`: where it begins.
__device__ __forceinline__ bool locate(u64 own, u64 target, u64* shared, u64& before) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = own;
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
        const u64 lower = __shfl_up_sync(LL_FULL_WARP, sum, n);
        if (lane >= n) sum += lower;
    }
    if (lane == 31) shared[warp] = sum;
    __syncthreads();
    before = warp_sum_u64(lane < warp ? shared[lane] : 0) + sum - own;
    __syncthreads();
    return before <= target && target - before < own;
}

// Gives `body` every logit of a row with its id, LL_IN_FLIGHT loads under way at once.
template <class Body>
__device__ __forceinline__ void for_each(const float* __restrict__ row, unsigned n, Body body) {
    for (unsigned first = threadIdx.x; first < n; first += LL_DRAW_THREADS * LL_IN_FLIGHT) {
        float logits[LL_IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < LL_IN_FLIGHT; j++) {
            const unsigned id = first + j * LL_DRAW_THREADS;
            logits[j] = id < n ? row[id] : -LL_INFINITY;
        }
#pragma unroll
        for (int j = 0; j < LL_IN_FLIGHT; j++) {
            const unsigned id = first + j * LL_DRAW_THREADS;
            if (id < n) body(logits[j], id);
        }
    }
}

// --- sample_scan ---

__device__ __forceinline__ bool is_edited(const SampleParams& p) {
    return p.n_edits != 0 || p.mask != LL_NONE || p.allowed != LL_NONE || (p.flags & LL_PENALTIES);
}

__device__ __forceinline__ bool is_scored(const SampleParams& p, unsigned n_before) {
    return p.n_prompt_top != LL_NONE && n_before < p.n_prompt;
}

__device__ __forceinline__ bool applies(const Edit& e, const unsigned* words, const int* tokens, unsigned n_before,
                                        unsigned n_prompt) {
    if (n_before >= e.until) return false;
    if (e.word == LL_NONE) return true;
    const unsigned n = words[e.word];
    if (n_before < n_prompt + n) return false;
    for (unsigned i = 0; i < n; i++) {
        if ((unsigned)tokens[n_before - n + i] != words[e.word + 1 + i]) return false;
    }
    return true;
}

// One block for each chunk (x) of each row (y). Chunks that rules change are written to `edited`.
extern "C" __global__ void __launch_bounds__(256) sample_scan(
    const float* __restrict__ logits, float* __restrict__ edited, unsigned vocab, const unsigned* __restrict__ slots,
    const int* __restrict__ positions, const SampleParams* __restrict__ params, const int* __restrict__ tokens,
    unsigned max_len, const unsigned* __restrict__ masks, const Edit* __restrict__ edits,
    const unsigned* __restrict__ words, ChunkStat* __restrict__ stats) {
    __shared__ float value[LL_CHUNK];
    __shared__ unsigned seen[LL_CHUNK];
    __shared__ u64 shared[32];
    const SampleParams& p = params[slots[blockIdx.y]];
    if (!(p.flags & LL_ACTIVE)) return;
    const unsigned n_before = positions[blockIdx.y] + 1, begin = blockIdx.x * LL_CHUNK;
    const unsigned n = min(vocab - begin, (unsigned)LL_CHUNK), tid = threadIdx.x;
    const size_t at = (size_t)blockIdx.y * vocab + begin;
    const bool scored = is_scored(p, n_before);

    int bad = 0;
    u64 best = 0;
#pragma unroll
    for (int j = 0; j < LL_CHUNK / LL_SCAN_THREADS; j++) {
        const unsigned i = tid + j * LL_SCAN_THREADS;
        if (i < n) {
            value[i] = logits[at + i];
            bad |= !is_finite(value[i]);
            best = max(best, pack(value[i], begin + i));
        }
    }
    best = block_max_u64(best, shared);
    bad = __syncthreads_or(bad);
    float largest = of_key((unsigned)(best >> 32));
    const float raw_max = largest;
    u64 raw_mass = 0, mass = 0;
    if (!bad && (scored || p.n_top != LL_NONE)) {
        const Scale one = {raw_max, 1.44269502f, 1.92596303e-8f};  // log2(e) in two parts
        for (unsigned i = tid; i < n; i += LL_SCAN_THREADS) raw_mass += units(distance(one, value[i]));
        raw_mass = block_sum_u64(raw_mass, shared);
    }
    if (!bad && !scored && is_edited(p)) {
        const unsigned n_words = (vocab + 31) / 32;
        const int* history = tokens + (size_t)slots[blockIdx.y] * max_len;
        for (unsigned i = tid; i < n; i += LL_SCAN_THREADS) {
            const unsigned id = begin + i;
            unsigned bits = LL_NONE;
            if (p.mask != LL_NONE) bits &= masks[(size_t)p.mask * n_words + id / 32];
            if (p.allowed != LL_NONE) bits &= masks[(size_t)p.allowed * n_words + id / 32];
            if (!(bits >> id % 32 & 1)) value[i] = -LL_INFINITY;
            seen[i] = 0;
        }
        __syncthreads();
        // The edits of an id lie side by side and are one thread's, in their order.
        const Edit* list = edits + p.first_edit;
        for (unsigned e = tid; e < p.n_edits; e += LL_SCAN_THREADS) {
            const unsigned id = list[e].id;
            if (id < begin || id - begin >= n || (e > 0 && list[e - 1].id == id)) continue;
            for (unsigned same = e; same < p.n_edits && list[same].id == id; same++) {
                if (applies(list[same], words, history, n_before, p.n_prompt)) value[id - begin] += list[same].bias;
            }
        }
        if (p.flags & LL_PENALTIES) {
            const unsigned n_seen = max(n_before, p.n_prompt);
            for (unsigned j = tid; j < n_seen; j += LL_SCAN_THREADS) {
                const unsigned i = (unsigned)history[j] - begin;
                if (i >= n) continue;
                if (j < p.n_prompt) {
                    atomicOr(&seen[i], LL_IN_PROMPT);
                } else {
                    atomicAdd(&seen[i], 1u);
                }
            }
        }
        __syncthreads();
        best = 0;
        for (unsigned i = tid; i < n; i += LL_SCAN_THREADS) {
            float x = value[i];
            if ((p.flags & LL_PENALTIES) && seen[i] != 0) {
                // Rounded after each operation, as on the CPU: nothing here may become an fma.
                x = x > 0.0f ? x / p.repetition : __fmul_rn(x, p.repetition);
                const unsigned count = seen[i] & ~LL_IN_PROMPT;
                if (count != 0) {
                    x = __fadd_rn(__fadd_rn(x, -p.presence), -__fmul_rn(p.frequency, (float)count));
                }
                value[i] = x;
            }
            edited[at + i] = x;
            best = max(best, pack(x, begin + i));
        }
        best = block_max_u64(best, shared);
        largest = of_key((unsigned)(best >> 32));
    }
    if (!bad && !scored && !(p.flags & LL_GREEDY) && is_finite(largest)) {
        const Scale scale = {largest, p.scale_high, p.scale_low};
        for (unsigned i = tid; i < n; i += LL_SCAN_THREADS) mass += units(distance(scale, value[i]));
        mass = block_sum_u64(mass, shared);
    }
    if (tid == 0) stats[(size_t)blockIdx.y * gridDim.x + blockIdx.x] = {best, mass, raw_mass, raw_max, (unsigned)bad};
}

// --- what is kept of a row ---

// Kept: a greater key, or this one and an id up to `last`.
struct Cut {
    unsigned key, last;
};

__device__ __forceinline__ bool keeps(Cut cut, unsigned key, unsigned id) {
    return key > cut.key || (key == cut.key && id <= cut.last);
}

// Keys by which candidates are ordered, the best first: the logit's own, or its deviation from a mean distance.
struct Measure {
    Scale scale;
    bool by_deviation;
    float mean;
};

__device__ __forceinline__ unsigned key_of(const Measure& m, float logit, float distance) {
    return m.by_deviation ? ~__float_as_uint(fabsf(distance - m.mean)) : order_key(logit);
}

// Bins of the first round: a 32nd of log2 wide, growing as keys fall, so that a bin is an interval of keys.
__device__ __forceinline__ unsigned bin_of(const Measure& m, float distance) {
    const float x = m.by_deviation ? fabsf(distance - m.mean) : distance;
    return (unsigned)fminf(x * 32.0f, (float)(LL_BINS - 1));
}

__device__ __forceinline__ unsigned bin_of_key(const Measure& m, unsigned key) {
    const float x = m.by_deviation ? __uint_as_float(~key) : distance(m.scale, of_key(key));
    return (unsigned)fminf(x * 32.0f, (float)(LL_BINS - 1));
}

// The least key of lo..=hi for which `holds`, which is so at hi and stays so once it is. By one whole warp.
template <class Holds>
__device__ __forceinline__ unsigned least_key(unsigned lo, unsigned hi, Holds holds) {
    const unsigned lane = threadIdx.x % 32;
    while (lo < hi) {
        const unsigned step = (hi - lo) / 32 + 1, at = min(lo + lane * step, hi);
        const unsigned held = __ballot_sync(LL_FULL_WARP, holds(at));
        const unsigned first = held ? __ffs(held) - 1 : 32;
        if (first == 0) return lo;
        const unsigned below = lo + (first - 1) * step;
        hi = min(held ? lo + first * step : hi, hi);
        lo = min(below + 1, hi);
    }
    return lo;
}

// What a block that ends a row shares.
struct Work {
    u64 mass[LL_BINS];
    unsigned count[LL_BINS];
    u64 masses[LL_MAX_CHUNKS];
    u64 scan[32];
    u64 before;
    unsigned bin, lo, hi, id;
};

// What a search is for: the best `count`, or (share < 1) the best until their mass reaches a share of all.
struct Goal {
    unsigned count;
    float share;
};

// Narrows `kept` to the best by `m`: finds the key where the goal is reached by histograms of ever smaller intervals,
// and of candidates equal there takes those with the lowest ids. Returns a cut of `m`'s keys.
__device__ __forceinline__ Cut search(const float* __restrict__ row, unsigned vocab, const Measure& m, Cut kept,
                                      Goal goal, Work& h) {
    const bool by_mass = goal.share < 1.0f;
    const unsigned tid = threadIdx.x;
    unsigned lo = 0, hi = 0, shift = 0, count;
    u64 wanted = 0, above = 0;
    for (bool first = true;; first = false) {
        for (unsigned i = tid; i < LL_BINS; i += LL_DRAW_THREADS) h.mass[i] = h.count[i] = 0;
        __syncthreads();
        for_each(row, vocab, [&](float logit, unsigned id) {
            if (!keeps(kept, order_key(logit), id)) return;
            const float t = distance(m.scale, logit);
            unsigned bin;
            if (first) {
                bin = bin_of(m, t);
            } else {
                const unsigned key = key_of(m, logit, t);
                if (key < lo || key > hi) return;
                bin = (hi - key) >> shift;
            }
            atomicAdd(&h.count[bin], 1u);
            if (by_mass) atomicAdd(&h.mass[bin], units(t));
        });
        __syncthreads();
        const unsigned mine = tid * (LL_BINS / LL_DRAW_THREADS);
        u64 own = 0;
        for (unsigned i = mine; i < mine + LL_BINS / LL_DRAW_THREADS; i++) own += by_mass ? h.mass[i] : h.count[i];
        if (first) {
            const u64 total = block_sum_u64(own, h.scan);
            wanted = by_mass ? max((u64)ceil((double)total * (double)goal.share), (u64)1) : goal.count;
            if (wanted > total || (!by_mass && wanted == total)) return m.by_deviation ? Cut{0, LL_NONE} : kept;
        }
        u64 before;
        if (locate(own, wanted - 1 - above, h.scan, before)) {
            for (unsigned i = mine;; i++) {
                const u64 next = before + (by_mass ? h.mass[i] : h.count[i]);
                if (next >= wanted - above) {
                    h.bin = i;
                    break;
                }
                before = next;
            }
            h.before = before;
        }
        __syncthreads();
        const unsigned bin = h.bin;
        count = h.count[bin];
        above += h.before;
        if (first) {
            if (tid < 32) {
                const unsigned least = m.by_deviation ? 0x80000000u : LL_LEAST_KEY;
                const unsigned most = m.by_deviation ? LL_NONE : order_key(m.scale.best);
                const unsigned from = least_key(least, most, [&](unsigned key) { return bin_of_key(m, key) <= bin; });
                const unsigned to =
                    bin == 0 ? most
                             : least_key(from, most, [&](unsigned key) { return bin_of_key(m, key) < bin; }) - 1;
                if (tid == 0) {
                    h.lo = from;
                    h.hi = to;
                }
            }
            __syncthreads();
            lo = h.lo;
            hi = h.hi;
        } else {
            hi -= bin << shift;
            lo = hi - lo >> shift ? hi - ((1u << shift) - 1) : lo;
        }
        const bool whole = by_mass ? count == 1 : above + count == wanted;
        if (whole || lo == hi) break;
        const int bits = 32 - __clz((int)(hi - lo));
        shift = bits > 11 ? bits - 11 : 0;
        __syncthreads();
    }
    u64 n_kept = count;
    if (lo == hi) {
        // Equal keys have equal weights.
        const u64 each = by_mass ? h.mass[h.bin] / count : 1;
        n_kept = min((wanted - above + each - 1) / each, (u64)count);
    }
    unsigned last = LL_NONE;
    if (n_kept < count) {
        u64 n_before = 0, before;
        for (unsigned base = 0;; base += LL_DRAW_THREADS) {
            const unsigned id = base + tid;
            bool equal = false;
            if (id < vocab) {
                const float logit = row[id];
                equal = keeps(kept, order_key(logit), id) && key_of(m, logit, distance(m.scale, logit)) == lo;
            }
            const unsigned n = __syncthreads_count(equal);
            if (n_before + n < n_kept) {
                n_before += n;
                continue;
            }
            if (locate(equal, n_kept - 1 - n_before, h.scan, before)) h.id = id;
            __syncthreads();
            last = h.id;
            break;
        }
    }
    __syncthreads();
    if (!m.by_deviation) {
        if (lo < kept.key) return kept;
        if (lo == kept.key) last = min(last, kept.last);
    }
    return {lo, last};
}

// --- sample_draw ---

// 53 bits of Philox4x32-10 as the CPU's philox.rs takes them, at the upper end of a u64.
__device__ __forceinline__ u64 uniform_bits(u64 seed, unsigned choice, unsigned position) {
    unsigned c[4] = {position, choice, 0, 0}, k[2] = {(unsigned)seed, (unsigned)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const u64 p0 = (u64)0xd2511f53u * c[0], p1 = (u64)0xcd9e8d57u * c[2];
        c[0] = (unsigned)(p1 >> 32) ^ c[1] ^ k[0];
        c[2] = (unsigned)(p0 >> 32) ^ c[3] ^ k[1];
        c[1] = (unsigned)p1;
        c[3] = (unsigned)p0;
        k[0] += 0x9e3779b9u;
        k[1] += 0xbb67ae85u;
    }
    return ((u64)c[0] << 32 | c[1]) >> 11 << 11;
}

// Both cuts of a row; the second is by typical_p.
struct Kept {
    Cut by_logit, by_deviation;
    Measure typical;
};

__device__ __forceinline__ u64 units_kept(const Kept& kept, Scale scale, float logit, unsigned id) {
    if (!keeps(kept.by_logit, order_key(logit), id)) return 0;
    const float t = distance(scale, logit);
    const bool typical = !kept.typical.by_deviation || keeps(kept.by_deviation, key_of(kept.typical, logit, t), id);
    return typical ? units(t) : 0;
}

__device__ __forceinline__ bool is_filtered(const SampleParams& p) {
    return p.top_k != 0 || p.top_p < 1.0f || p.min_p > 0.0f || p.typical_p < 1.0f;
}

// min_p, top_k, top_p, typical_p, in this order.
__device__ __forceinline__ Kept filter(const float* __restrict__ row, unsigned vocab, const SampleParams& p, Scale scale,
                                       Work& h) {
    Kept kept = {{LL_LEAST_KEY, LL_NONE}, {0, LL_NONE}, {scale, false, 0.0f}};
    if (threadIdx.x < 32) {
        // The CPU's own condition, in f64.
        h.lo = least_key(LL_LEAST_KEY, order_key(scale.best), [&](unsigned key) {
            const double scaled = ((double)of_key(key) - (double)scale.best) * p.inv_temperature;
            return scaled > LL_NEGLIGIBLE && (p.min_p <= 0.0f || exp(scaled) >= (double)p.min_p);
        });
    }
    __syncthreads();
    kept.by_logit.key = h.lo;
    for (int stage = 0; stage < 3; stage++) {
        Goal goal = {p.top_k, 1.0f};
        if (stage == 0 && p.top_k == 0) continue;
        if (stage > 0) {
            goal.share = stage == 1 ? p.top_p : p.typical_p;
            if (!(goal.share < 1.0f)) continue;
        }
        if (stage == 2) {
            // A surprise less the entropy is a distance less the mean distance.
            u64 mass = 0, moment = 0;
            for_each(row, vocab, [&](float logit, unsigned id) {
                if (!keeps(kept.by_logit, order_key(logit), id)) return;
                const float t = distance(scale, logit), weight = exp2f(-t);
                mass += (u64)(weight * LL_UNITS);
                moment += (u64)(weight * t * LL_UNITS);
            });
            mass = block_sum_u64(mass, h.scan);
            moment = block_sum_u64(moment, h.scan);
            kept.typical.by_deviation = true;
            kept.typical.mean = (float)((double)moment / (double)mass);
        }
        const Cut cut = search(row, vocab, kept.typical, kept.by_logit, goal, h);
        (stage == 2 ? kept.by_deviation : kept.by_logit) = cut;
    }
    return kept;
}

// The kept units of each chunk, into `masses`. Each warp takes 1024 logits at a time.
__device__ __forceinline__ void chunk_masses(const float* __restrict__ row, unsigned vocab, const Kept& kept, Scale scale,
                                             u64* masses) {
    for (unsigned i = threadIdx.x; i < LL_MAX_CHUNKS; i += LL_DRAW_THREADS) masses[i] = 0;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    for (unsigned begin = threadIdx.x / 32 * 1024; begin < vocab; begin += LL_DRAW_THREADS / 32 * 1024) {
        u64 sum = 0;
#pragma unroll 8
        for (int j = 0; j < 32; j++) {
            const unsigned id = begin + j * 32 + lane;
            if (id < vocab) sum += units_kept(kept, scale, row[id], id);
        }
        sum = warp_sum_u64(sum);
        if (lane == 0 && sum != 0) atomicAdd(&masses[begin / LL_CHUNK], sum);
    }
    __syncthreads();
}

// The token at the uniform share of the weights, in the order of ids.
__device__ __forceinline__ unsigned draw(const float* __restrict__ row, unsigned vocab, const SampleParams& p,
                                         unsigned n_before, float best, const ChunkStat* stats, Work& h) {
    const unsigned n_chunks = (vocab + LL_CHUNK - 1) / LL_CHUNK, tid = threadIdx.x;
    Scale scale = {best, p.scale_high, p.scale_low};
    Kept kept = {{LL_LEAST_KEY, LL_NONE}, {0, LL_NONE}, {scale, false, 0.0f}};
    // A chunk's mass is relative to its own maximum; `factor` makes it relative to the row's.
    double factor = 1.0;
    const bool filtered = is_filtered(p);
    u64 own = 0;
    if (filtered) {
        kept = filter(row, vocab, p, scale, h);
        chunk_masses(row, vocab, kept, scale, h.masses);
        if (tid < n_chunks) own = h.masses[tid];
    } else if (tid < n_chunks && stats[tid].mass != 0) {
        factor = exp(((double)of_key((unsigned)(stats[tid].best >> 32)) - (double)best) * p.inv_temperature);
        own = (u64)((double)stats[tid].mass * factor);
    }
    const u64 total = block_sum_u64(own, h.scan);
    const u64 target = __umul64hi(uniform_bits(p.seed, p.choice, n_before), total);
    u64 before;
    if (locate(own, target, h.scan, before)) {
        h.bin = tid;
        h.before = target - before;
        if (!filtered) h.before = min((u64)((double)h.before / factor), stats[tid].mass - 1);
    }
    __syncthreads();
    const unsigned begin = h.bin * LL_CHUNK + tid * (LL_CHUNK / LL_DRAW_THREADS);
    const u64 rest = h.before;
    if (!filtered) scale.best = of_key((unsigned)(stats[h.bin].best >> 32));
    own = 0;
    for (unsigned id = begin; id < min(begin + LL_CHUNK / LL_DRAW_THREADS, vocab); id++) {
        own += units_kept(kept, scale, row[id], id);
    }
    if (locate(own, rest, h.scan, before)) {
        unsigned id = begin;
        for (;; id++) {
            before += units_kept(kept, scale, row[id], id);
            if (before > rest) break;
        }
        h.id = id;
    }
    __syncthreads();
    return h.id;
}

// One block for each row.
extern "C" __global__ void __launch_bounds__(512, 2) sample_draw(
    const float* __restrict__ logits, const float* __restrict__ edited, unsigned vocab,
    const unsigned* __restrict__ slots, const int* __restrict__ positions, const SampleParams* __restrict__ params,
    const ChunkStat* __restrict__ stats, int* __restrict__ tokens, unsigned max_len, int* __restrict__ last_tokens,
    RowResult* __restrict__ results) {
    __shared__ Work h;
    const unsigned slot = slots[blockIdx.x], n_before = positions[blockIdx.x] + 1, tid = threadIdx.x;
    const unsigned n_chunks = (vocab + LL_CHUNK - 1) / LL_CHUNK;
    const SampleParams& p = params[slot];
    RowResult result = {0, LL_IDLE, 0.0f, 0};
    const bool scored = is_scored(p, n_before);
    if (p.flags & LL_ACTIVE) {
        const ChunkStat* of_row = stats + (size_t)blockIdx.x * n_chunks;
        const int bad = __syncthreads_or(tid < n_chunks && of_row[tid].bad);
        const u64 best = block_max_u64(tid < n_chunks ? of_row[tid].best : 0, h.scan);
        const float largest = of_key((unsigned)(best >> 32));
        if (bad) {
            result.outcome = LL_NON_FINITE;
        } else if (scored) {
            result = {(unsigned)tokens[(size_t)slot * max_len + n_before], LL_TOKEN, 0.0f, 0};
        } else if (largest == -LL_INFINITY) {
            result.outcome = LL_ALL_MASKED;
        } else if (!is_finite(largest)) {
            result.outcome = LL_NON_FINITE;
        } else {
            result.outcome = LL_TOKEN;
            result.id = (unsigned)best ^ LL_NONE;
            if (!(p.flags & LL_GREEDY)) {
                const float* row = (is_edited(p) ? edited : logits) + (size_t)blockIdx.x * vocab;
                result.id = draw(row, vocab, p, n_before, largest, of_row, h);
            }
        }
    }
    if (tid != 0) return;
    results[blockIdx.x] = result;
    if (result.outcome == LL_IDLE || scored) return;
    // A row at fault goes on with token 0 until the host has seen it.
    if (last_tokens) last_tokens[slot] = (int)result.id;
    if (tokens && n_before < max_len) tokens[(size_t)slot * max_len + n_before] = (int)result.id;
}

// --- sample_logprobs ---

// One block for each row: logprob and rank of its token, and the best ones, falling, ties by id.
extern "C" __global__ void __launch_bounds__(512, 2) sample_logprobs(
    const float* __restrict__ logits, unsigned vocab, const unsigned* __restrict__ slots,
    const int* __restrict__ positions, const SampleParams* __restrict__ params, const ChunkStat* __restrict__ stats,
    RowResult* __restrict__ results, TopEntry* __restrict__ tops) {
    __shared__ Work h;
    __shared__ double sums[LL_MAX_CHUNKS];
    __shared__ TopEntry found[LL_MAX_TOP];
    const unsigned tid = threadIdx.x, n_before = positions[blockIdx.x] + 1;
    const unsigned n_chunks = (vocab + LL_CHUNK - 1) / LL_CHUNK;
    const SampleParams& p = params[slots[blockIdx.x]];
    const unsigned wanted = is_scored(p, n_before) ? p.n_prompt_top : p.n_top;
    if (!(p.flags & LL_ACTIVE) || results[blockIdx.x].outcome != LL_TOKEN || wanted == LL_NONE) return;
    const float* row = logits + (size_t)blockIdx.x * vocab;
    const ChunkStat* of_row = stats + (size_t)blockIdx.x * n_chunks;
    const float chunk_max = tid < n_chunks ? of_row[tid].raw_max : -LL_INFINITY;
    const float best = of_key((unsigned)(block_max_u64(pack(chunk_max, 0), h.scan) >> 32));
    if (tid < n_chunks) sums[tid] = (double)of_row[tid].raw_mass * exp((double)chunk_max - (double)best);
    if (tid == 0) h.id = 0;
    __syncthreads();
    // In one order whatever the threads do: sums of doubles depend on it.
    double sum = 0.0;
    for (unsigned i = 0; i < n_chunks; i++) sum += sums[i];
    const float normaliser = (float)((double)best + log(sum / (double)LL_UNITS));

    const unsigned n_top = min(wanted, min(vocab, (unsigned)LL_MAX_TOP));
    Cut cut = {LL_NONE, 0};
    if (n_top != 0) {
        const Measure m = {{best, 1.44269502f, 1.92596303e-8f}, false, 0.0f};
        cut = search(row, vocab, m, {LL_LEAST_KEY, LL_NONE}, {n_top, 1.0f}, h);
        if (tid == 0) h.id = 0;
        __syncthreads();
    }
    const float own = row[results[blockIdx.x].id];
    u64 n_better = 0;
    for_each(row, vocab, [&](float logit, unsigned id) {
        n_better += logit > own;
        if (keeps(cut, order_key(logit), id)) {
            const unsigned at = atomicAdd(&h.id, 1u);
            if (at < LL_MAX_TOP) found[at] = {id, logit};
        }
    });
    n_better = block_sum_u64(n_better, h.scan);
    if (tid < n_top) {
        const TopEntry mine = found[tid];
        unsigned rank = 0;
        for (unsigned i = 0; i < n_top; i++) rank += pack(found[i].logprob, found[i].id) > pack(mine.logprob, mine.id);
        tops[(size_t)blockIdx.x * LL_MAX_TOP + rank] = {mine.id, mine.logprob - normaliser};
    }
    if (tid == 0) {
        results[blockIdx.x].logprob = own - normaliser;
        results[blockIdx.x].rank = 1 + (unsigned)n_better;
    }
}
