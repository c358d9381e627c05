//! Row-wise work on the pool.

use crate::threads::Pool;

/// Elements from which rows are spread over the threads; with fewer, a region costs more than it saves.
pub(super) const PARALLEL_ELEMENTS: usize = 1 << 14;

/// Calls `job(first_row, rows)` on groups of consecutive rows that together are `out`, each on one thread. The cuts
/// only affect the speed, because each row is computed independently.
pub(super) fn for_row_runs(
    pool: &Pool,
    out: &mut [f32],
    row_len: usize,
    job: &(dyn Fn(usize, &mut [f32]) + Sync),
) {
    if out.len() < PARALLEL_ELEMENTS {
        return job(0, out);
    }
    let run = (out.len() / row_len).div_ceil(pool.n_threads());
    pool.run_chunks(out, run * row_len, &|i, rows| job(i * run, rows));
}
