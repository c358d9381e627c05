//! `llaisys-fuzz TARGET` runs a target on inputs from AFL++. `llaisys-fuzz seeds TARGET FOLDER` writes the initial
//! inputs.
//!
//! A target fails (by aborting) on a panic, and if more than four times the input plus 64 MiB is allocated at a time.
//! AFL++ itself reports a run of more than a second as a hang.

mod allocator;
#[path = "../../crates/llaisys-core/tests/model_files/mod.rs"]
mod model_files;
mod targets;

use std::path::Path;

#[global_allocator]
static COUNTING: allocator::Counting = allocator::Counting;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["seeds", name, folder] => {
            for (i, seed) in targets::find(name).seeds().into_iter().enumerate() {
                std::fs::write(Path::new(folder).join(format!("seed-{i}")), seed)
                    .expect("the folder is writable");
            }
        }
        [name] => {
            let mut target = targets::find(name);
            afl::fuzz!(|input: &[u8]| allocator::bounded(4 * input.len() + (64 << 20), || target.run(input)));
        }
        _ => panic!("usage: TARGET, or seeds TARGET FOLDER; targets: {}", targets::NAMES.join(" ")),
    }
}
