//! From logits to a token: `spec` (a request's parameters), `sampler` (the state of one sequence), `filters` (narrow
//! the candidates), `philox` (the random draw). Deterministic for each request; calls do not allocate after warm-up.

mod filters;
pub mod philox;
mod sampler;
mod spec;

pub use sampler::{Logprobs, Outcome, RowFault, SampleAt, Sampler, Scratch, sample, sample_after_drafts};
pub use spec::SamplerSpec;
