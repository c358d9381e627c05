// Attention of rows that are the only one of their sequence: one query row and its whole context. One block computes
// one row, one KV head (up to 16 of the query heads that read it) and one split of the keys that the row sees.
// `attn_merge` merges the splits.
//
// The query heads of a group are the rows of the tensor core's tile, padded to 16. Each key and value is read from
// memory once for the whole group, and the products cost little compared with that. The bytes in flight bound the
// speed. So each of the four warps has its own keys (16 of every 64), copies and softmax, and the block has no barrier
// before the end.
//
// The grid fixes the number of splits, and the kernel reads their bounds from device memory, so a captured launch stays
// correct while contexts grow. A split without keys ends at once. A row that sees nothing (padding) is not written.

constexpr int WARPS = 4;
constexpr int KEYS = 16;
// Keys of a block's step. A split's length is a multiple of it.
constexpr int STEP = WARPS * KEYS;
// Two steps are in flight while one is computed, if that leaves shared memory for other blocks; otherwise one.
constexpr int STAGES = D <= 96 ? 3 : 2;
// Row stride of the warps' sums in shared memory: the pairs of floats of a half warp are in different banks.
constexpr int SUM_STRIDE = D + 8;

struct WarpKeys {
    T k[STAGES][KEYS * STRIDE];
    T v[STAGES][KEYS * STRIDE];
};

// The warps' sums reuse the memory of the keys when all keys are processed.
union Shared {
    WarpKeys keys[WARPS];
    float sums[WARPS][16 * SUM_STRIDE];
};

// The work of a block: query heads `head .. head + n_rows` of the row, and keys `begin .. end` of those that it sees.
struct Part {
    int head, n_rows, begin, end;
};

// Keys of a split, so that n_splits of them cover n keys.
__device__ __forceinline__ int split_length(int n, int n_splits) {
    return ((n + n_splits - 1) / n_splits + STEP - 1) / STEP * STEP;
}

// The cell of key i in lane i < 16, for the warp's step at `base`; NO_CELL behind the end.
__device__ __forceinline__ unsigned cell_of(const unsigned* cells, int base, int end) {
    const int lane = threadIdx.x % 32, key = base + lane;
    return lane < KEYS && key < end ? cells[key] : NO_CELL;
}

// Starts the copies of a warp's 16 keys and values; lane i has the cell of key i. Keys that do not exist become zeros,
// because a weight of zero times unwritten memory might be NaN.
__device__ __forceinline__ void fetch(WarpKeys& keys, int stage, const T* k, const T* v, unsigned cell,
                                      unsigned cell_width) {
#pragma unroll
    for (int n = 0; n < KEYS * CHUNKS / 32; ++n) {
        const int chunk = threadIdx.x % 32 + n * 32, key = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        const unsigned from_cell = __shfl_sync(LL_FULL_WARP, cell, key);
        const bool seen = from_cell != NO_CELL;
        const size_t from = seen ? (size_t)from_cell * cell_width + column : 0;
        cp_async16(&keys.k[stage][key * STRIDE + column], k + from, seen);
        cp_async16(&keys.v[stage][key * STRIDE + column], v + from, seen);
    }
}

// The warp's share of the part's keys.
__device__ __forceinline__ void attend(Rows& rows, WarpKeys& keys, const Part& part, const T* q, const T* k, const T* v,
                                       const unsigned* cells, unsigned cell_width, float scale_log2) {
    const int lane = threadIdx.x % 32, own = part.begin + threadIdx.x / 32 * KEYS;
    // Cells are read before all copies, and later one step before their keys, so that a gather waits for one memory
    // access and not for two.
    unsigned first[STAGES];
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) first[stage] = cell_of(cells, own + stage * STEP, part.end);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        if (own + stage * STEP < part.end) fetch(keys, stage, k, v, first[stage], cell_width);
        cp_commit();
    }
    unsigned next = first[STAGES - 1];

    // The A fragments of the queries, directly from memory. Rows beyond the group are zeros.
    unsigned query[D / 16][4];
#pragma unroll
    for (int c = 0; c < D / 16; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = lane / 4 + i % 2 * 8, column = c * 16 + i / 2 * 8 + lane % 4 * 2;
            query[c][i] = r < part.n_rows ? *(const unsigned*)(q + r * D + column) : 0;
        }

    int stage = 0, done = STAGES - 1;
    for (int base = own; base < part.end; base += STEP) {
        // The step's keys have arrived, and every lane is done with the previous stage, which is filled again.
        cp_wait<STAGES - 2>();
        __syncwarp();
        const int coming = base + (STAGES - 1) * STEP;
        if (coming < part.end) fetch(keys, done, k, v, next, cell_width);
        cp_commit();
        next = cell_of(cells, coming + STEP, part.end);

        float s[2][4];
        unsigned p[1][4];
        scores<1>(s, query, keys.k[stage], lane);
        const int left = part.end - base - lane % 4 * 2;
        hide<1>(s, 0, 0, left);
        hide<1>(s, 1, 0, left);
        to_weights<1>(p, rows, s, scale_log2);
        add_values<1>(rows, p, keys.v[stage], lane);
        done = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
}

// Merges the softmaxes of the four warps: scales them to the common maximum and adds them in the order of the warps.
// Calls `store(r, column, max, sum of weights, weighted values of two columns)`.
template <class Store>
__device__ __forceinline__ void merge_warps(float (&sums)[WARPS][16 * SUM_STRIDE], Rows& rows, int n_rows,
                                            Store store) {
    __shared__ float row_max[WARPS][16], row_sum[WARPS][16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    finish_sums(rows);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (lane % 4 == 0) {
            row_max[warp][lane / 4 + r * 8] = rows.max[r];
            row_sum[warp][lane / 4 + r * 8] = rows.sum[r];
        }
    }
    // After this barrier no warp reads keys, and the sums reuse their memory.
    __syncthreads();
    const auto highest = [&](int i) {
        return fmaxf(fmaxf(row_max[0][i], row_max[1][i]), fmaxf(row_max[2][i], row_max[3][i]));
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = lane / 4 + r * 8;
        const float factor = fast_exp2(rows.max[r] - highest(i));
        float* to = &sums[warp][i * SUM_STRIDE + lane % 4 * 2];
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            to[c * 8] = rows.o[c][2 * r] * factor;
            to[c * 8 + 1] = rows.o[c][2 * r + 1] * factor;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_rows * (D / 2); i += WARPS * 32) {
        const int r = i / (D / 2), column = i % (D / 2) * 2;
        float total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            total += row_sum[w][r] * fast_exp2(row_max[w][r] - highest(r));
            x += sums[w][r * SUM_STRIDE + column];
            y += sums[w][r * SUM_STRIDE + column + 1];
        }
        store(r, column, highest(r), total, x, y);
    }
}

// q [rows, n_heads, D], rows q_width elements apart (they may be a part of qkv); k, v [cells, n_kv_heads, D]; cells:
// the lists; start, n_hidden, n_visible [rows]: row r sees cells[start + n_hidden .. start + n_visible]. Grid:
// n_kv_heads * ceil(group / 16), splits, rows. With one split the result is written to out [rows, n_heads, D].
// Otherwise each split writes sums [rows, n_heads, splits, D] and stats [rows, n_heads, splits, 2] (maximum, sum of
// weights).
extern "C" __global__ void __launch_bounds__(128, 3) attn_decode(
    const T* q, unsigned q_width, const T* k, const T* v, const unsigned* cells, const unsigned* start,
    const int* n_hidden, const int* n_visible, T* out, float* sums, float* stats, int n_kv_heads, int group,
    float scale_log2) {
    LL_DYNAMIC_SHARED(shared_memory);
    Shared& shared = *(Shared*)shared_memory;
    const int kv_head = blockIdx.x % n_kv_heads, first = blockIdx.x / n_kv_heads * 16;
    const int split = blockIdx.y, n_splits = gridDim.y, row = blockIdx.z;
    const int hidden = n_hidden[row], seen = n_visible[row] - hidden;
    const int length = split_length(seen, n_splits), begin = split * length;
    cells += start[row] + hidden;
    // All threads of the block return together, so no barrier waits for them.
    if (begin >= seen) return;
    const Part part = {kv_head * group + first, min(group - first, 16), begin, min(begin + length, seen)};
    Rows rows;
    attend(rows, shared.keys[threadIdx.x / 32], part, q + (size_t)row * q_width + part.head * D, k + kv_head * D,
           v + kv_head * D, cells, n_kv_heads * D, scale_log2);
    const size_t place = (size_t)row * n_kv_heads * group + part.head;
    merge_warps(shared.sums, rows, part.n_rows, [&](int r, int column, float highest, float total, float x, float y) {
        if (n_splits == 1) {
            const float inverse = 1.0f / total;
            *(unsigned*)(out + (place + r) * D + column) = pack2(x * inverse, y * inverse);
            return;
        }
        const size_t at = (place + r) * n_splits + split;
        sums[at * D + column] = x;
        sums[at * D + column + 1] = y;
        if (column == 0) {
            stats[at * 2] = highest;
            stats[at * 2 + 1] = total;
        }
    });
}

// Merges the splits of one head of one row. Grid: n_heads, rows; arrays as attn_decode's. Threads are GROUPS groups of
// D / 4. Each group loads every GROUPS-th split, so that all loads are in flight at once. The groups are added in
// order.
extern "C" __global__ void __launch_bounds__(256) attn_merge(const float* sums, const float* stats, const int* n_hidden,
                                                             const int* n_visible, T* out, int n_splits) {
    constexpr int COLUMNS = D / 4, GROUPS = 256 / COLUMNS;
    __shared__ float shared[GROUPS * D];
    const int row = blockIdx.y, seen = n_visible[row] - n_hidden[row];
    if (seen <= 0) return;
    const int length = split_length(seen, n_splits), n = (seen + length - 1) / length;
    const size_t place = (size_t)row * gridDim.x + blockIdx.x;
    sums += place * n_splits * D;
    stats += place * n_splits * 2;
    // Each warp computes this with one split per lane, so that all loads are one memory access.
    float highest = FLOOR, total = 0.0f;
    for (int split = threadIdx.x % 32; split < n; split += 32) highest = fmaxf(highest, stats[split * 2]);
    highest = warp_max(highest);
    for (int split = threadIdx.x % 32; split < n; split += 32) {
        total += stats[split * 2 + 1] * fast_exp2(stats[split * 2] - highest);
    }
    total = warp_sum(total);
    const int group = threadIdx.x / COLUMNS, column = threadIdx.x % COLUMNS * 4;
    if (group < GROUPS) {
        float x[4] = {};
#pragma unroll 4
        for (int split = group; split < n; split += GROUPS) {
            const float factor = fast_exp2(stats[split * 2] - highest);
            const Vec16 part = load16(sums + split * D + column);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] += __uint_as_float(part.v[i]) * factor;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) shared[group * D + column + i] = x[i];
    }
    __syncthreads();
    const float inverse = 1.0f / total;
    for (int i = threadIdx.x; i < D / 2; i += 256) {
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            x += shared[g * D + 2 * i];
            y += shared[g * D + 2 * i + 1];
        }
        *(unsigned*)(out + place * D + 2 * i) = pack2(x * inverse, y * inverse);
    }
}
