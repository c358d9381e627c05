//! Tests of the CUDA backend without a GPU, on an emulator that runs the kernels on the CPU. With
//! `LLAISYS_TEST_DEVICE=gpu` the tests of `parity` run on the first GPU.
#![cfg(feature = "cuda")]

#[path = "../common/c_library.rs"]
mod c_library;
#[path = "../common/mod.rs"]
mod common;
#[path = "../model_files/mod.rs"]
mod model_files;
#[path = "../sampling_model/mod.rs"]
mod sampling_model;

mod context_host;
mod emulator;
mod steps_rig;

mod cells;
mod compile;
mod context;
mod context_steps;
#[allow(unsafe_code, reason = "launches kernels with defects")]
mod emulator_defects;
mod nccl;
mod overlap;
mod parity;
mod probe;
mod ranks;
mod steps;
