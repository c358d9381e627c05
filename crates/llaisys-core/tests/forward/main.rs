//! The forward pass: compared with a plain f64 one, and split over ranks.

#[path = "../common/mod.rs"]
mod common;
#[path = "../model_files/mod.rs"]
mod model_files;

mod collective;
mod decoder;
mod tensor_parallel;
