//! Measure the speed of the machine: `machine_speed N_THREADS`. For each line on standard input it prints one number,
//! the median of seven measurements with all threads:
//!
//! - `read`: 10^9 bytes per second of sequential reads of memory that is not cached.
//! - `flops`: 10^9 f32 operations per second of fused multiply-adds (two operations each), in registers.
//!
//! It uses only the standard library, so that one call of rustc builds it (`-C target-cpu=native`, optimized) and it
//! is independent of the code that it is compared with.

use std::hint::black_box;
use std::io::{self, BufRead, Write};
use std::thread;
use std::time::Instant;

/// Bytes that are read; an L3 cache of 32 MiB has a sixteenth of them.
const BYTES: usize = 512 << 20;
const REPEATS: usize = 7;
/// Independent sums, enough to hide the latency of one, in as many registers as there are: eight of 16 with AVX-512,
/// else twelve of 8.
const SUMS: usize = if cfg!(target_feature = "avx512f") { 128 } else { 96 };
const STEPS: usize = 2_000_000;

/// Returns the sum of the words; the compiler vectorizes the loop.
fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

/// Returns the sum of `SUMS` chains of fused multiply-adds.
fn multiply_and_add(factor: f32, term: f32) -> f32 {
    let mut sums = [0_f32; SUMS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = sum.mul_add(factor, term);
        }
    }
    sums.iter().sum()
}

/// Returns 10^9 units per second of `work` units, divided over all threads.
fn rate(n_threads: usize, work: f64, part: &(dyn Fn(usize) + Sync)) -> f64 {
    let start = Instant::now();
    thread::scope(|scope| {
        for i in 0..n_threads {
            scope.spawn(move || part(i));
        }
    });
    work / start.elapsed().as_secs_f64() / 1e9
}

fn main() -> io::Result<()> {
    let n_threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).filter(|n| *n > 0).unwrap_or(1);
    let words = vec![1_u64; BYTES / 8];
    let parts: Vec<&[u64]> = words.chunks(words.len().div_ceil(n_threads)).collect();
    let flops = (2 * STEPS * SUMS * n_threads) as f64;
    for line in io::stdin().lock().lines() {
        let read = line?.trim() != "flops";
        let part = |i: usize| match read {
            true => _ = black_box(sum(parts[i])),
            false => _ = black_box(multiply_and_add(black_box(0.5), black_box(1.0))),
        };
        let work = if read { BYTES as f64 } else { flops };
        let mut rates: Vec<f64> = (0..REPEATS).map(|_| rate(n_threads, work, &part)).collect();
        rates.sort_by(f64::total_cmp);
        println!("{:.2}", rates[REPEATS / 2]);
        io::stdout().flush()?;
    }
    Ok(())
}
