// The state of running sequences lives on the device: a decode step reads and advances it here, and cells move here.
// Integers and copies only.

// First in a decode step: slots append the cell that the plan gives them, and rows get what the step's kernels read.
//
// plan [n_rows]: slot and new cell; cell_table [n_slots, max_len]; lengths, last_tokens [n_slots]: cells of a slot, and
// its token that has none yet; bases [n_slots]: the position of a slot's first cell. Of each row: tokens, positions; cells: where its key and value go; starts: where its list
// begins in the flat cell_table; n_visible: the list's length, its own cell the last; n_hidden: cells before the window
// (`window` cells are seen; 0: all). Slot 0 is of padding: length 0, cell 0, for ever. A slot is in one row at most, and
// has room for a cell: the host plans so.
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

// Cells move: in each of gridDim.y arrays, `stride` bytes apart, cell moves[i].y becomes moves[i].x. No cell is both
// written and anything else. cell_bytes is a multiple of 16.
extern "C" __global__ void __launch_bounds__(128) copy_cells(unsigned char* __restrict__ arrays,
                                                             const uint2* __restrict__ moves, unsigned long long stride,
                                                             int cell_bytes) {
    unsigned char* array = arrays + blockIdx.y * stride;
    const unsigned char* from = array + (size_t)moves[blockIdx.x].x * cell_bytes;
    unsigned char* to = array + (size_t)moves[blockIdx.x].y * cell_bytes;
    for (int i = threadIdx.x * 16; i < cell_bytes; i += 128 * 16) store16(to + i, load16(from + i));
}
