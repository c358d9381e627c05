//! From logits to a token: `spec` (a request's parameters), `sampler` (the state of one sequence), `draw` (from weights
//! to a token), `filters` (narrow the candidates), `philox` (the random numbers). Deterministic for each request; calls do
//! not allocate after warm-up.

mod draw;
mod filters;
pub mod philox;
mod sampler;
mod spec;

pub use sampler::{Logprobs, Outcome, RowFault, SampleAt, Sampler, Scratch, sample, sample_after_drafts};
pub use spec::SamplerSpec;
