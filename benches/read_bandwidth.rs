//! Read bandwidth of the machine: `read_bandwidth N_THREADS`; each line on standard input is answered with one
//! figure, 10^9 bytes a second: the median of seven plain reads of memory that no cache holds.
//!
//! Of the standard library alone, so that one call of rustc builds it (scripts/build-peers.sh) and it depends on
//! nothing that it is used to judge.

use std::hint::black_box;
use std::io::{self, BufRead, Write};
use std::thread;
use std::time::Instant;

/// Bytes that are read; an L3 of 32 MiB holds a sixteenth of them.
const BYTES: usize = 512 << 20;
const READS: usize = 7;

/// The sum of the words; the compiler makes it a loop over vectors.
fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

/// Bytes a second of one read by all threads, each its own part.
fn read(words: &[u64], n_threads: usize) -> f64 {
    let start = Instant::now();
    thread::scope(|scope| {
        for part in words.chunks(words.len().div_ceil(n_threads)) {
            scope.spawn(move || black_box(sum(part)));
        }
    });
    BYTES as f64 / start.elapsed().as_secs_f64()
}

fn main() -> io::Result<()> {
    let n_threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).filter(|n| *n > 0).unwrap_or(1);
    let words = vec![1_u64; BYTES / 8];
    for line in io::stdin().lock().lines() {
        line?;
        let mut rates: Vec<f64> = (0..READS).map(|_| read(&words, n_threads)).collect();
        rates.sort_by(f64::total_cmp);
        println!("{:.2}", rates[READS / 2] / 1e9);
        io::stdout().flush()?;
    }
    Ok(())
}
