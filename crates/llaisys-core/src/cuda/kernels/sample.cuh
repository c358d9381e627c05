// Common parts of the kernels of sample.cu: the arrays' structs, order and weight of a logit, sums over a block, and
// the search for the best candidates of a row.

#define LL_CHUNK 4096     // logits of a block of sample_scan
#define LL_MAX_CHUNKS 128
#define LL_SEGMENT 512    // logits of one of the block's warps
#define LL_SEGMENTS (LL_CHUNK / LL_SEGMENT)
#define LL_SCAN_THREADS 256
#define LL_DRAW_THREADS 512
#define LL_LOG2_BINS 11
#define LL_BINS (1 << LL_LOG2_BINS)
#define LL_BINS_OF_THREAD (LL_BINS / LL_DRAW_THREADS)
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
    unsigned until;  // applies at positions below this
    unsigned word;   // applies if the completion ends with words[word + 1 ..][.. words[word]]
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

// The result of sample_scan for a chunk. Masses are in units, relative to the chunk's own maximum.
struct ChunkStat {
    u64 best;  // pack(logit, id) of the largest edited logit
    u64 mass;
    u64 raw_mass;
    float raw_max;
    unsigned bad;
    unsigned maxima[LL_SEGMENTS];  // key of the largest edited logit of each segment
};

static_assert(sizeof(SampleParams) == 88 && sizeof(Edit) == 16 && sizeof(RowResult) == 16 && sizeof(TopEntry) == 8 &&
                  sizeof(ChunkStat) == 64,
              "sample.rs and sample_tables.rs use these sizes");

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

// Orders candidates by logit, and those with equal logits by id, the lowest first.
__device__ __forceinline__ u64 pack(float logit, unsigned id) { return (u64)order_key(logit) << 32 | (id ^ LL_NONE); }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

struct Scale {
    float best, high, low;
};

// The scale without a temperature: log2(e) in two parts.
__device__ __forceinline__ Scale natural(float best) { return {best, 1.44269502f, 1.92596303e-8f}; }

// Non-decreasing as the logit falls; large where it is -inf.
__device__ __forceinline__ float distance(Scale s, float logit) {
    const float d = s.best - logit;
    return fminf(fmaf(d, s.high, d * s.low), 1e30f);
}

__device__ __forceinline__ u64 units(float distance) { return (u64)(exp2f(-distance) * LL_UNITS); }

// Concatenates the threads' `own` counts. Returns true in the thread whose range contains `target`; `before` is the
// start of that range.
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
    before = warp_sum(lane < warp ? shared[lane] : 0) + sum - own;
    __syncthreads();
    return before <= target && target - before < own;
}

// --- what is kept of a row ---

// Keeps candidates with a greater key, and those with this key and an id up to `last`.
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

// Bins of the first round are 1/32 of a log2 wide. Their numbers grow as keys fall, so that a bin is an interval of
// keys.
__device__ __forceinline__ unsigned bin_of(const Measure& m, float distance) {
    const float x = m.by_deviation ? fabsf(distance - m.mean) : distance;
    return (unsigned)fminf(x * 32.0f, (float)(LL_BINS - 1));
}

__device__ __forceinline__ unsigned bin_of_key(const Measure& m, unsigned key) {
    const float x = m.by_deviation ? __uint_as_float(~key) : distance(m.scale, of_key(key));
    return (unsigned)fminf(x * 32.0f, (float)(LL_BINS - 1));
}

// Returns the least key of lo..=hi for which `holds` is true. It is true for hi, and for every key above a key for
// which it is true. One whole warp calls this.
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

// Shared memory of a block that finishes a row.
struct Work {
    u64 mass[LL_BINS];
    unsigned count[LL_BINS];
    u64 masses[LL_MAX_CHUNKS];
    unsigned maxima[LL_MAX_CHUNKS * LL_SEGMENTS];
    u64 scan[32];
    u64 before;
    unsigned bin, lo, hi, id;
};

// Calls `body` with each segment that has a key of `least` or more; each warp processes one segment at a time.
template <class Body>
__device__ __forceinline__ void for_segments(unsigned vocab, unsigned least, const Work& h, Body body) {
    const unsigned n = (vocab + LL_SEGMENT - 1) / LL_SEGMENT;
    for (unsigned segment = threadIdx.x / 32; segment < n; segment += LL_DRAW_THREADS / 32) {
        if (h.maxima[segment] >= least) body(segment);
    }
}

// Calls `body` with each logit of a segment and its id, with LL_IN_FLIGHT loads in flight at once.
template <class Body>
__device__ __forceinline__ void for_each_of(const float* __restrict__ row, unsigned vocab, unsigned segment,
                                            Body body) {
    const unsigned begin = segment * LL_SEGMENT + threadIdx.x % 32;
    for (unsigned first = begin; first < begin + LL_SEGMENT; first += 32 * LL_IN_FLIGHT) {
        float logits[LL_IN_FLIGHT];
#pragma unroll
        for (int j = 0; j < LL_IN_FLIGHT; j++) logits[j] = first + j * 32 < vocab ? row[first + j * 32] : 0.0f;
#pragma unroll
        for (int j = 0; j < LL_IN_FLIGHT; j++) {
            if (first + j * 32 < vocab) body(logits[j], first + j * 32);
        }
    }
}

// The maxima of a row's segments: load_maxima reads those of sample_scan, find_maxima computes them from the row.
__device__ __forceinline__ void load_maxima(const ChunkStat* stats, unsigned vocab, Work& h) {
    const unsigned n = (vocab + LL_SEGMENT - 1) / LL_SEGMENT;
    for (unsigned i = threadIdx.x; i < n; i += LL_DRAW_THREADS) {
        h.maxima[i] = stats[i / LL_SEGMENTS].maxima[i % LL_SEGMENTS];
    }
    __syncthreads();
}

__device__ __forceinline__ void find_maxima(const float* __restrict__ row, unsigned vocab, Work& h) {
    const unsigned n = (vocab + LL_SEGMENT - 1) / LL_SEGMENT;
    for (unsigned segment = threadIdx.x / 32; segment < n; segment += LL_DRAW_THREADS / 32) {
        unsigned best = 0;
        for_each_of(row, vocab, segment, [&](float logit, unsigned) { best = max(best, order_key(logit)); });
        best = __reduce_max_sync(LL_FULL_WARP, best);
        if (threadIdx.x % 32 == 0) h.maxima[segment] = best;
    }
    __syncthreads();
}

// Calls `body` with each logit of the row whose key is `least` or more, and its id, and with some others.
template <class Body>
__device__ __forceinline__ void for_each(const float* __restrict__ row, unsigned vocab, unsigned least, const Work& h,
                                         Body body) {
    for_segments(vocab, least, h, [&](unsigned segment) { for_each_of(row, vocab, segment, body); });
}

// Returns a lower bound of the keys of the best `n` candidates: the nth largest of the segments' maxima.
__device__ __forceinline__ unsigned key_of_best(unsigned n, unsigned vocab, Work& h) {
    const unsigned n_segments = (vocab + LL_SEGMENT - 1) / LL_SEGMENT;
    if (n > n_segments) return 0;
    for (unsigned i = threadIdx.x; i < n_segments; i += LL_DRAW_THREADS) {
        unsigned rank = 1;
        for (unsigned j = 0; j < n_segments; j++) {
            rank += h.maxima[j] > h.maxima[i] || (h.maxima[j] == h.maxima[i] && j < i);
        }
        if (rank == n) h.hi = h.maxima[i];
    }
    __syncthreads();
    const unsigned key = h.hi;
    __syncthreads();
    return key;
}

// The goal of a search: the best `count` candidates, or (share < 1) the best until their mass reaches a share of all.
struct Goal {
    unsigned count;
    float share;
};

// A round counts the candidates whose keys are in lo..=hi, in bins of 2^shift keys from hi down. The first round counts
// all candidates, in bins of distance.
struct Round {
    bool first;
    unsigned lo, hi, shift;
};

// Counts the candidates of a round by bin, and adds their masses if `by_mass`.
__device__ __forceinline__ void count_bins(const float* __restrict__ row, unsigned vocab, const Measure& m, Cut kept,
                                           const Round& round, bool by_mass, Work& h) {
    for (unsigned i = threadIdx.x; i < LL_BINS; i += LL_DRAW_THREADS) h.mass[i] = h.count[i] = 0;
    __syncthreads();
    const unsigned least = round.first || m.by_deviation ? kept.key : max(kept.key, round.lo);
    for_each(row, vocab, least, h, [&](float logit, unsigned id) {
        if (!keeps(kept, order_key(logit), id)) return;
        const float t = distance(m.scale, logit);
        unsigned bin;
        if (round.first) {
            bin = bin_of(m, t);
        } else {
            const unsigned key = key_of(m, logit, t);
            if (key < round.lo || key > round.hi) return;
            bin = (round.hi - key) >> round.shift;
        }
        atomicAdd(&h.count[bin], 1u);
        if (by_mass) atomicAdd(&h.mass[bin], units(t));
    });
    __syncthreads();
}

// Finds the bin where the running sum from the best bin on exceeds `target`, and writes it and the sum before it to
// h.bin and h.before. `own` is the sum of this thread's bins.
__device__ __forceinline__ void choose_bin(u64 own, u64 target, bool by_mass, Work& h) {
    u64 before;
    if (locate(own, target, h.scan, before)) {
        unsigned bin = threadIdx.x * LL_BINS_OF_THREAD;
        for (;; bin++) {
            const u64 next = before + (by_mass ? h.mass[bin] : h.count[bin]);
            if (next > target) break;
            before = next;
        }
        h.bin = bin;
        h.before = before;
    }
    __syncthreads();
}

// Finds the keys of a bin of the first round.
__device__ __forceinline__ void keys_of_bin(const Measure& m, unsigned bin, Round& round, Work& h) {
    if (threadIdx.x < 32) {
        const unsigned least = m.by_deviation ? 0x80000000u : LL_LEAST_KEY;
        const unsigned most = m.by_deviation ? LL_NONE : order_key(m.scale.best);
        const unsigned lo = least_key(least, most, [&](unsigned key) { return bin_of_key(m, key) <= bin; });
        unsigned hi = most;
        if (bin > 0) hi = least_key(lo, most, [&](unsigned key) { return bin_of_key(m, key) < bin; }) - 1;
        h.lo = lo;
        h.hi = hi;
    }
    __syncthreads();
    round.lo = h.lo;
    round.hi = h.hi;
}

// Returns the id of the nth candidate, from 1, whose key is `key`.
__device__ __forceinline__ unsigned nth_equal(const float* __restrict__ row, unsigned vocab, const Measure& m, Cut kept,
                                              unsigned key, u64 nth, Work& h) {
    u64 n_before = 0, before;
    for (unsigned base = 0;; base += LL_DRAW_THREADS) {
        const unsigned id = base + threadIdx.x;
        bool equal = false;
        if (id < vocab) {
            const float logit = row[id];
            equal = keeps(kept, order_key(logit), id) && key_of(m, logit, distance(m.scale, logit)) == key;
        }
        const unsigned n = __syncthreads_count(equal);
        if (n_before + n < nth) {
            n_before += n;
            continue;
        }
        if (locate(equal, nth - 1 - n_before, h.scan, before)) h.id = id;
        __syncthreads();
        return h.id;
    }
}

// Narrows `kept` to the best candidates by `m`. Finds the key where the goal is reached by histograms of smaller and
// smaller intervals. Of candidates with that key it keeps those with the lowest ids. Returns a cut of `m`'s keys.
__device__ __forceinline__ Cut search(const float* __restrict__ row, unsigned vocab, const Measure& m, Cut kept,
                                      Goal goal, Work& h) {
    const bool by_mass = goal.share < 1.0f;
    if (!by_mass) {
        const unsigned key = key_of_best(goal.count, vocab, h);
        if (key > kept.key) kept = {key, LL_NONE};
    }
    Round round = {true, 0, 0, 0};
    u64 wanted = 0, above = 0;
    unsigned count, last = LL_NONE;
    for (;; round.first = false) {
        count_bins(row, vocab, m, kept, round, by_mass, h);
        u64 own = 0;
        for (unsigned i = 0; i < LL_BINS_OF_THREAD; i++) {
            const unsigned bin = threadIdx.x * LL_BINS_OF_THREAD + i;
            own += by_mass ? h.mass[bin] : h.count[bin];
        }
        if (round.first) {
            const u64 total = block_sum(own, h.scan);
            wanted = by_mass ? max((u64)ceil((double)total * (double)goal.share), (u64)1) : goal.count;
            if (wanted > total || (!by_mass && wanted == total)) return m.by_deviation ? Cut{0, LL_NONE} : kept;
        }
        choose_bin(own, wanted - 1 - above, by_mass, h);
        const unsigned bin = h.bin;
        count = h.count[bin];
        above += h.before;
        if (round.first) {
            keys_of_bin(m, bin, round, h);
        } else {
            round.hi -= bin << round.shift;
            if (round.hi - round.lo >> round.shift) round.lo = round.hi - ((1u << round.shift) - 1);
        }
        // The whole bin is kept, or all its keys are equal.
        if ((by_mass ? count == 1 : above + count == wanted) || round.lo == round.hi) break;
        const int bits = 32 - __clz((int)(round.hi - round.lo));
        round.shift = max(bits - LL_LOG2_BINS, 0);
        __syncthreads();
    }
    if (round.lo == round.hi) {
        // Equal keys have equal weights.
        const u64 each = by_mass ? h.mass[h.bin] / count : 1, nth = (wanted - above + each - 1) / each;
        if (nth < count) last = nth_equal(row, vocab, m, kept, round.lo, nth, h);
    }
    __syncthreads();
    if (m.by_deviation || round.lo > kept.key) return {round.lo, last};
    return round.lo < kept.key ? kept : Cut{kept.key, min(last, kept.last)};
}
