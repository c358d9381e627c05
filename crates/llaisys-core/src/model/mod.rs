//! Models: facts (`config`, `family`, `info`), files (`checkpoint`), packed tensors (`weights`), and the
//! forward pass (`decoder`).

pub mod decoder;
pub mod weights;
