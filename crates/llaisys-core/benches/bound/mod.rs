//! The roofline of a bench, printed above its times.

/// FLOP per byte above which arithmetic, not memory, is assumed to limit a CPU.
const RIDGE: f64 = 16.0;

/// Prints the bytes and operations of one iteration of `name`, and what limits it.
pub(crate) fn print_bound(name: &str, n_bytes: usize, n_flops: usize) {
    let intensity = n_flops as f64 / n_bytes.max(1) as f64;
    let limit = if intensity < RIDGE { "memory bandwidth" } else { "arithmetic" };
    let (megabytes, megaflops) = (n_bytes as f64 / 1e6, n_flops as f64 / 1e6);
    println!("{name}: {megabytes:.3} MB and {megaflops:.3} MFLOP per iteration, limited by {limit}");
}
