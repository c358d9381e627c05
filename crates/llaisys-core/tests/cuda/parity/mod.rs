//! Each op and the whole decoder against their references: on the emulator, or on a GPU. `benches/gpu/bundle.py` carries
//! these tests to a machine with one.

mod attention;
mod decoder;
mod gemv;
mod graph;
mod product;
mod rows;
mod sampling;
mod state;
