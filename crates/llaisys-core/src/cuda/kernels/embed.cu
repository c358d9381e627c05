// Rows of the embedding table, by token. One block per row. It only copies, so results are exact.
//
// table [vocab_size, width], tokens [n_rows], out [n_rows, width]; width is a multiple of 8.
extern "C" __global__ void __launch_bounds__(128) embed(const T* __restrict__ table, const int* __restrict__ tokens,
                                                        T* __restrict__ out, int width) {
    const size_t row = blockIdx.x;
    const T* from = table + (size_t)tokens[row] * width;
    T* to = out + row * width;
    for (int i = threadIdx.x * 8; i < width; i += 128 * 8) store16(to + i, load16(from + i));
}
