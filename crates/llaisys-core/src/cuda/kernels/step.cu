// The state of running sequences is on the device: step_begin reads and advances it, and copy_cells copies cells. Both
// use integers and copies only.

// The first kernel of a decode step: appends the planned cell of each slot, and writes the arrays that the step's other
// kernels read.
//
// plan [n_rows]: slot and new cell. cell_table [n_slots, max_len]. lengths, last_tokens [n_slots]: number of cells of a
// slot, and its token that has no cell yet. bases [n_slots]: next position minus length. Arrays by row: tokens,
// positions; cells: the cell of its key and value; starts: the start of its list in the flat cell_table; n_visible: the
// length of the list, whose last cell is its own; n_hidden: cells before the window (`window` cells are seen; 0: all).
//
// Slot 0 belongs to padding: it always has length 0 and cell 0. The host makes sure that every other slot is in at most
// one row and has fewer than max_len cells.
extern "C" __global__ void __launch_bounds__(256) step_begin(
    const uint2* __restrict__ plan, unsigned* __restrict__ cell_table, int* __restrict__ lengths,
    const int* __restrict__ bases, const int* __restrict__ last_tokens, int* __restrict__ tokens, int* __restrict__ positions,
    unsigned* __restrict__ cells, unsigned* __restrict__ starts, int* __restrict__ n_hidden, int* __restrict__ n_visible,
    int n_rows, int max_len, int window) {
    const int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= n_rows) return;
    const unsigned slot = plan[row].x;
    const bool runs = slot != 0;
    const int before = runs ? lengths[slot] : 0, length = runs ? before + 1 : 0;
    const unsigned start = slot * (unsigned)max_len, cell = runs ? plan[row].y : 0;
    if (runs) {
        cell_table[start + before] = cell;
        lengths[slot] = length;
    }
    tokens[row] = runs ? last_tokens[slot] : 0;
    positions[row] = runs ? bases[slot] + before : 0;
    cells[row] = cell;
    starts[row] = start;
    n_hidden[row] = window > 0 && length > window ? length - window : 0;
    n_visible[row] = length;
}

// Copies cell moves[i].x to cell moves[i].y in each of gridDim.y arrays, which are `stride` bytes apart. A cell that is
// written is in no other move. cell_bytes is a multiple of 16.
extern "C" __global__ void __launch_bounds__(128) copy_cells(unsigned char* __restrict__ arrays,
                                                             const uint2* __restrict__ moves, unsigned long long stride,
                                                             int cell_bytes) {
    unsigned char* array = arrays + blockIdx.y * stride;
    const unsigned char* from = array + (size_t)moves[blockIdx.x].x * cell_bytes;
    unsigned char* to = array + (size_t)moves[blockIdx.x].y * cell_bytes;
    for (int i = threadIdx.x * 16; i < cell_bytes; i += 128 * 16) store16(to + i, load16(from + i));
}
