// Attention of chunks of prompts. One block computes one tile of one KV head: 64 query rows of one sequence and all
// keys that any of them sees, in steps of 64 keys, which are gathered through the sequence's list of cells.
//
// A tile's rows pack (token, head in the group). The heads of a group read the same keys. So a chunk of few tokens
// still fills the tensor cores, and each key is read from memory once for the whole group.
//
// A row's result depends only on its own keys, bit for bit. Steps begin at multiples of 64 of the list, independently
// of the tile, and a step with no visible key leaves a row's state unchanged.

constexpr int TILE_ROWS = 64;
constexpr int KEYS = 64;
constexpr int THREADS = 128;
// Blocks per SM that limit the registers. With heads of 128 three blocks would spill; GPUs of 12.x have shared memory
// for two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BLOCKS_PER_SM = 2;
#else
constexpr int BLOCKS_PER_SM = D > 96 ? 2 : 3;
#endif

// Packed rows `first .. first + count` of the sequence whose rows in the batch begin at `row`: packed row p is head p %
// group of token row + p / group. `start` is the start of the sequence's cells in the list. Some row of the tile sees
// each of `begin .. end`; every row sees all of `all_begin .. all_end` (empty if all_begin >= all_end).
struct Tile {
    int row, first, count;
    unsigned start;
    int begin, end, all_begin, all_end;
};

struct Shared {
    // k[1] also stages the queries, which are in registers before the second step's keys arrive.
    T k[2][KEYS * STRIDE];
    T v[2][KEYS * STRIDE];
    unsigned cells[2][KEYS];
};

// The cell of key `i` of the step at `base`; NO_CELL, for which nothing is read, if the tile does not see it.
__device__ __forceinline__ unsigned cell_of(const unsigned* cells, const Tile& tile, int base, int i) {
    const int key = base + i;
    return key >= tile.begin && key < tile.end ? cells[tile.start + key] : NO_CELL;
}

// Starts the copies of one step's keys and values. Keys that no row sees become zeros, because a weight of zero times
// unwritten memory might be NaN.
__device__ __forceinline__ void fetch(Shared& shared, int stage, const T* k, const T* v, unsigned cell_width) {
    // Four at a time: one by one, each waits for its cell; with all at once, the calling loop would spill.
#pragma unroll 4
    for (int n = 0; n < KEYS * CHUNKS / THREADS; ++n) {
        const int chunk = threadIdx.x + n * THREADS, key = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        const unsigned cell = shared.cells[stage][key];
        const bool seen = cell != NO_CELL;
        const size_t from = seen ? (size_t)cell * cell_width + column : 0;
        cp_async16(&shared.k[stage][key * STRIDE + column], k + from, seen);
        cp_async16(&shared.v[stage][key * STRIDE + column], v + from, seen);
    }
}

// Starts the copies of the tile's queries. Rows behind the last become zeros.
__device__ __forceinline__ void fetch_queries(T* to, const Tile& tile, const T* q, unsigned q_width, int group) {
#pragma unroll 1
    for (int n = 0; n < TILE_ROWS * CHUNKS / THREADS; ++n) {
        const int chunk = threadIdx.x + n * THREADS, i = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        const bool valid = i < tile.count;
        const int p = tile.first + (valid ? i : 0), head = blockIdx.x * group + p % group;
        const T* from = q + (size_t)(tile.row + p / group) * q_width + head * D + column;
        cp_async16(to + i * STRIDE + column, from, valid);
    }
}

// Hides the keys of a step that a thread's rows do not see. Few steps need it, so the rows' ranges are read again each
// time and use no registers in the other steps.
__device__ __forceinline__ void hide_unseen(float (&s)[KEYS / 8][4], const Tile& tile, const int* n_hidden,
                                            const int* n_visible, int group, int base) {
    const int lane = threadIdx.x % 32, base_of_thread = base + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = threadIdx.x / 32 * 16 + lane / 4 + r * 8;
        const int row = tile.row + (tile.first + (i < tile.count ? i : 0)) / group;
        hide<KEYS / 16>(s, r, n_hidden[row] - base_of_thread, n_visible[row] - base_of_thread);
    }
}

// Writes a warp's rows, divided by their sums of weights. A row that saw no key is not written.
__device__ __forceinline__ void store(const Rows& rows, const Tile& tile, T* out, int group) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = threadIdx.x / 32 * 16 + lane / 4 + r * 8;
        if (i >= tile.count || rows.sum[r] == 0.0f) continue;
        const int p = tile.first + i, row = tile.row + p / group, head = blockIdx.x * group + p % group;
        T* to = out + ((size_t)row * gridDim.x * group + head) * D + lane % 4 * 2;
        const float inverse = 1.0f / rows.sum[r];
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            *(unsigned*)(to + c * 8) = pack2(rows.o[c][2 * r] * inverse, rows.o[c][2 * r + 1] * inverse);
        }
    }
}

// q [rows, n_heads, D], rows q_width elements apart (they may be a part of qkv); k, v [cells, n_kv_heads, D]; cells:
// the lists; n_hidden, n_visible [rows]; tiles [grid.y]; out [rows, n_heads, D]. grid.x is n_kv_heads.
extern "C" __global__ void __launch_bounds__(128, BLOCKS_PER_SM) attn_prefill(
    const T* q, unsigned q_width, const T* k, const T* v, const unsigned* cells, const int* n_hidden,
    const int* n_visible, const Tile* tiles, T* out, int group, float scale_log2) {
    LL_DYNAMIC_SHARED(shared_memory);
    Shared& shared = *(Shared*)shared_memory;
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const unsigned cell_width = gridDim.x * D;
    // By reference: values that do not fit into registers are read again from the L1 cache.
    const Tile& tile = tiles[blockIdx.y];
    k += blockIdx.x * D;
    v += blockIdx.x * D;

    // The cells of the first two steps are read before the loop, and those of the step after next in each iteration, so
    // that a gather waits for one memory access and not for two.
    const int first_base = tile.begin / KEYS * KEYS;
    shared.cells[tid / KEYS][tid % KEYS] = cell_of(cells, tile, first_base, tid);
    __syncthreads();
    fetch(shared, 0, k, v, cell_width);
    fetch_queries(shared.k[1], tile, q, q_width, group);
    cp_commit();
    cp_wait<0>();
    __syncthreads();
    unsigned query[D / 16][4];
    const T* staged = &shared.k[1][(warp * 16 + lane % 16) * STRIDE + lane / 16 * 8];
#pragma unroll
    for (int c = 0; c < D / 16; ++c) ldmatrix_x4(query[c], staged + c * 16);

    Rows rows;
    for (int base = first_base, stage = 0; base < tile.end; base += KEYS, stage ^= 1) {
        // The step's keys have arrived, and every warp is done with the other stage.
        cp_wait<0>();
        __syncthreads();
        if (base + KEYS < tile.end) fetch(shared, stage ^ 1, k, v, cell_width);
        cp_commit();
        const unsigned later = tid < KEYS ? cell_of(cells, tile, base + 2 * KEYS, tid) : NO_CELL;
        if (warp * 16 < tile.count) {
            float s[KEYS / 8][4];
            unsigned p[KEYS / 16][4];
            scores<KEYS / 16>(s, query, shared.k[stage], lane);
            if (base < tile.all_begin || base + KEYS > tile.all_end) {
                hide_unseen(s, tile, n_hidden, n_visible, group, base);
            }
            to_weights<KEYS / 16>(p, rows, s, scale_log2);
            add_values<KEYS / 16>(rows, p, shared.v[stage], lane);
        }
        // Last read before this iteration's barrier, read again after the next one.
        if (tid < KEYS) shared.cells[stage][tid] = later;
    }
    finish_sums(rows);
    store(rows, tile, out, group);
}
