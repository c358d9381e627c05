//! Logits -> token: `spec` (what a request asks for), `sampler` (one sequence's state), `filters` (what narrows
//! the candidates), `philox` (the draw). Per request, deterministic, no allocation per call after warm-up.

mod filters;
pub mod philox;
mod sampler;
mod spec;

pub use sampler::{Logprobs, Outcome, RowFault, Sampler, Scratch, sample};
pub use spec::SamplerSpec;
