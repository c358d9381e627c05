// Joins the columns of rows, of which each rank has computed a part. It only copies, so results are exact.
//
// parts [n_parts, n_rows, width], out [n_rows, n_columns] with n_columns <= n_parts width; the columns behind are
// padding. Grid: n_rows, ceil(n_columns / 256).
extern "C" __global__ void __launch_bounds__(256) join_columns(const float* __restrict__ parts, float* __restrict__ out,
                                                               int n_rows, int width, int n_columns) {
    const int row = blockIdx.x, column = blockIdx.y * 256 + threadIdx.x;
    if (column >= n_columns) return;
    const int part = column / width;
    out[(size_t)row * n_columns + column] = parts[((size_t)part * n_rows + row) * width + (column - part * width)];
}
