//! `llaisys-fuzz TARGET`: AFL++ gives it inputs; `llaisys-fuzz seeds TARGET FOLDER` writes what it starts from.
//!
//! A target fails (by aborting) on a panic, and if more was allocated at any moment than four times the input and
//! 64 MiB. AFL++ itself takes a run of more than a second for a hang.

mod ballast;
#[path = "../../crates/llaisys-core/tests/model_files/mod.rs"]
mod model_files;
mod targets;

use std::path::Path;

#[global_allocator]
static COUNTING: ballast::Counting = ballast::Counting;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["seeds", name, folder] => {
            for (i, seed) in targets::find(name).seeds().into_iter().enumerate() {
                std::fs::write(Path::new(folder).join(format!("seed-{i}")), seed)
                    .expect("the folder takes files");
            }
        }
        [name] => {
            let mut target = targets::find(name);
            afl::fuzz!(|input: &[u8]| ballast::bounded(4 * input.len() + (64 << 20), || target.run(input)));
        }
        _ => panic!("give a target, or: seeds TARGET FOLDER; targets: {}", targets::NAMES.join(" ")),
    }
}
