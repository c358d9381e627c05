//! `SamplerSpec`: the sampling parameters of one sequence, in the core's form.

use crate::convert::natural;
use crate::errors::Fault;
use llaisys_core::Error;
use llaisys_core::sample::SamplerSpec as CoreSpec;
use pyo3::prelude::*;

/// Sampling parameters of one sequence. Bounds are checked when they are attached, where the vocabulary is known.
#[pyclass(frozen, module = "llaisys._core")]
pub(crate) struct SamplerSpec {
    pub(crate) spec: CoreSpec,
}

#[pymethods]
impl SamplerSpec {
    #[new]
    #[pyo3(signature = (
        *,
        temperature = 1.0,
        top_k = 0,
        top_p = 1.0,
        min_p = 0.0,
        typical_p = 1.0,
        repetition_penalty = 1.0,
        presence_penalty = 0.0,
        frequency_penalty = 0.0,
        logit_bias = Vec::new(),
        allowed_ids = Vec::new(),
        bad_words = Vec::new(),
        min_tokens = 0,
        stop_ids = Vec::new(),
        seed = 0,
        choice = 0,
        top_logprobs = -1,
        prompt_logprobs = -1,
        logprob_ids = Vec::new(),
    ))]
    fn new(
        py: Python<'_>,
        temperature: f32,
        top_k: i64,
        top_p: f32,
        min_p: f32,
        typical_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
        logit_bias: Vec<(i64, f32)>,
        allowed_ids: Vec<i64>,
        bad_words: Vec<Vec<i64>>,
        min_tokens: i64,
        stop_ids: Vec<i64>,
        seed: i128,
        choice: i64,
        top_logprobs: i64,
        prompt_logprobs: i64,
        logprob_ids: Vec<i64>,
    ) -> PyResult<Self> {
        let build = || -> Result<CoreSpec, Fault> {
            Ok(CoreSpec {
                temperature,
                top_k: natural("top_k", top_k)?,
                top_p,
                min_p,
                typical_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias: logit_bias
                    .iter()
                    .map(|&(id, bias)| Ok((natural("a token id of logit_bias", id)?, bias)))
                    .collect::<Result<_, Error>>()?,
                allowed_ids: naturals("a token id of allowed_ids", &allowed_ids)?,
                bad_words: bad_words
                    .iter()
                    .map(|word| naturals("a token id of bad_words", word))
                    .collect::<Result<_, Error>>()?,
                min_tokens: natural("min_tokens", min_tokens)?,
                stop_ids: naturals("a token id of stop_ids", &stop_ids)?,
                seed: seed_bits(seed)?,
                choice: natural("choice", choice)?,
                top_logprobs: unless_off("top_logprobs", top_logprobs)?,
                prompt_logprobs: unless_off("prompt_logprobs", prompt_logprobs)?,
                logprob_ids: naturals("a token id of logprob_ids", &logprob_ids)?,
            })
        };
        build().map(|spec| Self { spec }).map_err(|fault| fault.into_py(py))
    }
}

fn naturals(what: &'static str, ids: &[i64]) -> Result<Vec<u32>, Error> {
    ids.iter().map(|&id| natural(what, id)).collect()
}

/// Converts a count; `None` for -1.
fn unless_off(what: &'static str, n: i64) -> Result<Option<u32>, Error> {
    if n == -1 { Ok(None) } else { natural(what, n).map(Some) }
}

/// The 64 bits of a signed or unsigned seed.
fn seed_bits(seed: i128) -> Result<u64, Fault> {
    let signed = i64::try_from(seed).map(i64::cast_unsigned);
    signed
        .or_else(|_| u64::try_from(seed))
        .map_err(|_| Fault::Argument(format!("seed is {seed}, allowed are {} to {}", i64::MIN, u64::MAX)))
}
