// From logits to tokens and their logprobs, by the rules of src/sample/sampler.rs and in their order. sample.rs
// documents the arrays. There are three kernels. `sample_scan` reads each row once, with one block for each of its
// chunks. `sample_draw` finishes the row in one block. `sample_logprobs` runs if a row wants logprobs.
//
// Numerics: a weight is exp2(-distance) in f32, where `distance` is the difference to the best logit in scaled logits
// times log2(e). Weights are counted in whole units of 2^-44. Sums of units are integer sums, so they do not depend on
// the order of threads and blocks. The CPU's weights are f64: a draw differs from the CPU's if the uniform number is
// within the rounding (1e-6) of a boundary of the cumulative distribution. The order of logits is exact, with ties by
// id.

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

// A block's part of a row, in shared memory.
struct Chunk {
    unsigned begin, n;
    float* value;
    unsigned* seen;  // number of times in the completion, and LL_IN_PROMPT
};

__device__ __forceinline__ void apply_masks(const Chunk& c, const SampleParams& p, const unsigned* masks,
                                            unsigned n_words) {
    for (unsigned i = threadIdx.x; i < c.n; i += LL_SCAN_THREADS) {
        const unsigned id = c.begin + i;
        unsigned bits = LL_NONE;
        if (p.mask != LL_NONE) bits &= masks[(size_t)p.mask * n_words + id / 32];
        if (p.allowed != LL_NONE) bits &= masks[(size_t)p.allowed * n_words + id / 32];
        if (!(bits >> id % 32 & 1)) c.value[i] = -LL_INFINITY;
    }
}

// The edits of an id are adjacent, and one thread applies them in their order.
__device__ __forceinline__ void apply_edits(const Chunk& c, const SampleParams& p, const Edit* edits,
                                            const unsigned* words, const int* history, unsigned n_before) {
    for (unsigned e = threadIdx.x; e < p.n_edits; e += LL_SCAN_THREADS) {
        const unsigned id = edits[e].id;
        if (id < c.begin || id - c.begin >= c.n || (e > 0 && edits[e - 1].id == id)) continue;
        for (unsigned same = e; same < p.n_edits && edits[same].id == id; same++) {
            if (applies(edits[same], words, history, n_before, p.n_prompt)) c.value[id - c.begin] += edits[same].bias;
        }
    }
}

__device__ __forceinline__ void count_tokens(const Chunk& c, const SampleParams& p, const int* history,
                                             unsigned n_before) {
    for (unsigned i = threadIdx.x; i < c.n; i += LL_SCAN_THREADS) c.seen[i] = 0;
    __syncthreads();
    for (unsigned j = threadIdx.x; j < max(n_before, p.n_prompt); j += LL_SCAN_THREADS) {
        const unsigned i = (unsigned)history[j] - c.begin;
        if (i >= c.n) continue;
        if (j < p.n_prompt) {
            atomicOr(&c.seen[i], LL_IN_PROMPT);
        } else {
            atomicAdd(&c.seen[i], 1u);
        }
    }
}

// Rounds after each operation, as on the CPU: no operation here may become an fma.
__device__ __forceinline__ float penalised(float x, unsigned seen, const SampleParams& p) {
    if (seen == 0) return x;
    x = x > 0.0f ? x / p.repetition : __fmul_rn(x, p.repetition);
    const unsigned count = seen & ~LL_IN_PROMPT;
    return count == 0 ? x : __fadd_rn(__fadd_rn(x, -p.presence), -__fmul_rn(p.frequency, (float)count));
}

__device__ __forceinline__ u64 chunk_mass(const Chunk& c, Scale scale, u64* shared) {
    u64 mass = 0;
    for (unsigned i = threadIdx.x; i < c.n; i += LL_SCAN_THREADS) mass += units(distance(scale, c.value[i]));
    return block_sum(mass, shared);
}

// Returns the best candidate of the chunk, from each thread's best in its warp's segment; writes the key of each
// segment's best to `maxima`.
__device__ __forceinline__ u64 best_of_segments(u64 best, unsigned* maxima, u64* shared) {
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = (unsigned)(best >> 32);
    return block_max(best, shared);
}

// One block for each chunk (x) of each row (y). Writes chunks of rows with edits, masks or penalties to `edited`.
extern "C" __global__ void __launch_bounds__(256) sample_scan(
    const float* __restrict__ logits, float* __restrict__ edited, unsigned vocab, const unsigned* __restrict__ slots,
    unsigned slot_stride, const int* __restrict__ positions, const SampleParams* __restrict__ params,
    const int* __restrict__ tokens, unsigned max_len, const unsigned* __restrict__ masks,
    const Edit* __restrict__ edits,
    const unsigned* __restrict__ words, ChunkStat* __restrict__ stats) {
    __shared__ float value[LL_CHUNK];
    __shared__ unsigned seen[LL_CHUNK];
    __shared__ unsigned maxima[LL_SEGMENTS];
    __shared__ u64 shared[32];
    const unsigned slot = slots[blockIdx.y * slot_stride], n_before = positions[blockIdx.y] + 1;
    const unsigned begin = blockIdx.x * LL_CHUNK;
    const SampleParams& p = params[slot];
    if (!(p.flags & LL_ACTIVE)) return;
    const Chunk c = {begin, min(vocab - begin, (unsigned)LL_CHUNK), value, seen};
    const size_t at = (size_t)blockIdx.y * vocab + begin;
    const bool scored = is_scored(p, n_before);
    int bad = 0;
    u64 best = 0;
#pragma unroll
    for (int j = 0; j < LL_SEGMENT / 32; j++) {
        const unsigned i = threadIdx.x / 32 * LL_SEGMENT + j * 32 + threadIdx.x % 32;
        if (i < c.n) {
            value[i] = logits[at + i];
            bad |= !is_finite(value[i]);
            best = max(best, pack(value[i], begin + i));
        }
    }
    bad = __syncthreads_or(bad);
    best = best_of_segments(best, maxima, shared);
    ChunkStat stat = {best, 0, 0, of_key((unsigned)(best >> 32)), (unsigned)bad, {}};
    if (!bad && (scored || p.n_top != LL_NONE)) stat.raw_mass = chunk_mass(c, natural(stat.raw_max), shared);
    if (!bad && !scored && is_edited(p)) {
        const int* history = tokens + (size_t)slot * max_len;
        apply_masks(c, p, masks, (vocab + 31) / 32);
        __syncthreads();
        apply_edits(c, p, edits + p.first_edit, words, history, n_before);
        if (p.flags & LL_PENALTIES) count_tokens(c, p, history, n_before);
        __syncthreads();
        best = 0;
        for (int j = 0; j < LL_SEGMENT / 32; j++) {
            const unsigned i = threadIdx.x / 32 * LL_SEGMENT + j * 32 + threadIdx.x % 32;
            if (i >= c.n) break;
            if (p.flags & LL_PENALTIES) value[i] = penalised(value[i], seen[i], p);
            edited[at + i] = value[i];
            best = max(best, pack(value[i], begin + i));
        }
        stat.best = best_of_segments(best, maxima, shared);
    }
    const float largest = of_key((unsigned)(stat.best >> 32));
    if (!bad && !scored && !(p.flags & LL_GREEDY) && is_finite(largest)) {
        stat.mass = chunk_mass(c, {largest, p.scale_high, p.scale_low}, shared);
    }
    ChunkStat& out = stats[(size_t)blockIdx.y * gridDim.x + blockIdx.x];
    if (threadIdx.x < LL_SEGMENTS) out.maxima[threadIdx.x] = maxima[threadIdx.x];
    if (threadIdx.x != 0) return;
    out.best = stat.best;
    out.mass = stat.mass;
    out.raw_mass = stat.raw_mass;
    out.raw_max = stat.raw_max;
    out.bad = stat.bad;
}

// --- sample_draw ---

// 53 bits of Philox4x32-10, the same as the CPU's philox.rs uses, in the upper bits of a u64.
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

// Both cuts of a row. The second is by typical_p.
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
__device__ __forceinline__ Kept filter(const float* __restrict__ row, unsigned vocab, const SampleParams& p,
                                       Scale scale, Work& h) {
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
            // Surprise minus entropy equals distance minus mean distance.
            u64 mass = 0, moment = 0;
            for_each(row, vocab, kept.by_logit.key, h, [&](float logit, unsigned id) {
                if (!keeps(kept.by_logit, order_key(logit), id)) return;
                const float t = distance(scale, logit), weight = exp2f(-t);
                mass += (u64)(weight * LL_UNITS);
                moment += (u64)(weight * t * LL_UNITS);
            });
            mass = block_sum(mass, h.scan);
            moment = block_sum(moment, h.scan);
            kept.typical.by_deviation = true;
            kept.typical.mean = (float)((double)moment / (double)mass);
        }
        const Cut cut = search(row, vocab, kept.typical, kept.by_logit, goal, h);
        (stage == 2 ? kept.by_deviation : kept.by_logit) = cut;
    }
    return kept;
}

// Writes the kept units of each chunk to h.masses.
__device__ __forceinline__ void chunk_masses(const float* __restrict__ row, unsigned vocab, const Kept& kept,
                                             Scale scale, Work& h) {
    for (unsigned i = threadIdx.x; i < LL_MAX_CHUNKS; i += LL_DRAW_THREADS) h.masses[i] = 0;
    __syncthreads();
    for_segments(vocab, kept.by_logit.key, h, [&](unsigned segment) {
        u64 sum = 0;
        for_each_of(row, vocab, segment, [&](float logit, unsigned id) { sum += units_kept(kept, scale, logit, id); });
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&h.masses[segment / LL_SEGMENTS], sum);
    });
    __syncthreads();
}

// Returns the token at the uniform share of the weights, in the order of ids.
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
        load_maxima(stats, vocab, h);
        kept = filter(row, vocab, p, scale, h);
        chunk_masses(row, vocab, kept, scale, h);
        if (tid < n_chunks) own = h.masses[tid];
    } else if (tid < n_chunks && stats[tid].mass != 0) {
        factor = exp(((double)of_key((unsigned)(stats[tid].best >> 32)) - (double)best) * p.inv_temperature);
        own = (u64)((double)stats[tid].mass * factor);
    }
    const u64 total = block_sum(own, h.scan);
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
    const unsigned* __restrict__ slots, unsigned slot_stride, const int* __restrict__ positions,
    const SampleParams* __restrict__ params, const ChunkStat* __restrict__ stats, int* __restrict__ tokens,
    unsigned max_len, int* __restrict__ last_tokens, RowResult* __restrict__ results) {
    __shared__ Work h;
    const unsigned slot = slots[blockIdx.x * slot_stride], n_before = positions[blockIdx.x] + 1, tid = threadIdx.x;
    const unsigned n_chunks = (vocab + LL_CHUNK - 1) / LL_CHUNK;
    const SampleParams& p = params[slot];
    RowResult result = {0, LL_IDLE, 0.0f, 0};
    const bool scored = is_scored(p, n_before);
    if (p.flags & LL_ACTIVE) {
        const ChunkStat* of_row = stats + (size_t)blockIdx.x * n_chunks;
        const int bad = __syncthreads_or(tid < n_chunks && of_row[tid].bad);
        const u64 best = block_max(tid < n_chunks ? of_row[tid].best : 0, h.scan);
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
    // A row with a fault continues with token 0 until the host has seen the fault.
    if (last_tokens) last_tokens[slot] = (int)result.id;
    if (tokens && n_before < max_len) tokens[(size_t)slot * max_len + n_before] = (int)result.id;
}

// --- sample_logprobs ---

// One block for each row: the logprob and rank of its token, and the best tokens in descending order, with ties by id.
extern "C" __global__ void __launch_bounds__(512, 2) sample_logprobs(
    const float* __restrict__ logits, unsigned vocab, const unsigned* __restrict__ slots,
    unsigned slot_stride, const int* __restrict__ positions, const SampleParams* __restrict__ params,
    const ChunkStat* __restrict__ stats,
    RowResult* __restrict__ results, TopEntry* __restrict__ tops) {
    __shared__ Work h;
    __shared__ double sums[LL_MAX_CHUNKS];
    __shared__ TopEntry found[LL_MAX_TOP];
    const unsigned tid = threadIdx.x, n_before = positions[blockIdx.x] + 1;
    const unsigned n_chunks = (vocab + LL_CHUNK - 1) / LL_CHUNK;
    const SampleParams& p = params[slots[blockIdx.x * slot_stride]];
    const unsigned wanted = is_scored(p, n_before) ? p.n_prompt_top : p.n_top;
    if (!(p.flags & LL_ACTIVE) || results[blockIdx.x].outcome != LL_TOKEN || wanted == LL_NONE) return;
    const float* row = logits + (size_t)blockIdx.x * vocab;
    const ChunkStat* of_row = stats + (size_t)blockIdx.x * n_chunks;
    const float chunk_max = tid < n_chunks ? of_row[tid].raw_max : -LL_INFINITY;
    const float best = of_key((unsigned)(block_max(pack(chunk_max, 0), h.scan) >> 32));
    if (tid < n_chunks) sums[tid] = (double)of_row[tid].raw_mass * exp((double)chunk_max - (double)best);
    __syncthreads();
    // In a fixed order, because sums of doubles depend on it.
    double sum = 0.0;
    for (unsigned i = 0; i < n_chunks; i++) sum += sums[i];
    const float normaliser = (float)((double)best + log(sum / (double)LL_UNITS));

    const unsigned n_top = min(wanted, min(vocab, (unsigned)LL_MAX_TOP));
    const float own = row[results[blockIdx.x].id];
    Cut cut = {LL_NONE, 0};
    // The maxima of sample_scan are those of edited logits.
    if (is_edited(p)) {
        find_maxima(row, vocab, h);
    } else {
        load_maxima(of_row, vocab, h);
    }
    if (n_top != 0) {
        const Measure m = {natural(best), false, 0.0f};
        cut = search(row, vocab, m, {LL_LEAST_KEY, LL_NONE}, {n_top, 1.0f}, h);
    }
    if (tid == 0) h.id = 0;
    __syncthreads();
    u64 n_better = 0;
    for_each(row, vocab, min(cut.key, order_key(own)), h, [&](float logit, unsigned id) {
        n_better += logit > own;
        if (keeps(cut, order_key(logit), id)) {
            const unsigned at = atomicAdd(&h.id, 1u);
            if (at < LL_MAX_TOP) found[at] = {id, logit};
        }
    });
    n_better = block_sum(n_better, h.scan);
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
