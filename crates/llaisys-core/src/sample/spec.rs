//! The sampling parameters of one sequence, checked once.

use crate::error::SamplingError;

/// The sampling parameters of one sequence. Neutral values disable a rule; the defaults are neutral.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerSpec {
    /// Divides the logits; 0 is greedy. In `0..=100`.
    pub temperature: f32,
    /// Keeps the `k` best tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the best tokens until their probabilities reach this. In `(0, 1]`.
    pub top_p: f32,
    /// Keeps tokens with at least this fraction of the best one's probability. In `[0, 1]`.
    pub min_p: f32,
    /// Locally typical sampling (Meister et al., arXiv:2202.00666): keeps the tokens whose surprise is closest to the
    /// entropy until their probabilities reach this. In `(0, 1]`.
    pub typical_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or completion (arXiv:1909.05858). Above 0.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens in the completion. In `[-2, 2]`.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the completion, times their count. In `[-2, 2]`.
    pub frequency_penalty: f32,
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these ids may be drawn; empty allows all.
    pub allowed_ids: Vec<u32>,
    /// Token sequences that the completion must not contain. The last token of each is forbidden where the tokens
    /// before it are the newest of the completion.
    pub bad_words: Vec<Vec<u32>>,
    /// `stop_ids` cannot be drawn before the completion has this many tokens.
    pub min_tokens: u32,
    /// Ids that `min_tokens` forbids.
    pub stop_ids: Vec<u32>,
    /// Random seed of the draws.
    pub seed: u64,
    /// Index of this sequence among the `n` choices of a request.
    pub choice: u32,
    /// Logprobs to return: `None`, or those of the drawn token and of this many best ones.
    pub top_logprobs: Option<u32>,
    /// Not empty: the logprobs of the drawn token and of these ids, in this order, instead of `top_logprobs`.
    pub logprob_ids: Vec<u32>,
    /// Rows inside the prompt with logits output return, instead of a draw, the prompt's next token with its logprob
    /// and those of this many best ones. `None`: such rows are sampled as any other.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplerSpec {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_ids: Vec::new(),
            bad_words: Vec::new(),
            min_tokens: 0,
            stop_ids: Vec::new(),
            seed: 0,
            choice: 0,
            top_logprobs: None,
            logprob_ids: Vec::new(),
            prompt_logprobs: None,
        }
    }
}

impl SamplerSpec {
    /// Checks every range. NaN is outside all of them.
    pub fn check(&self, vocab_size: usize) -> Result<(), SamplingError> {
        in_range("temperature", self.temperature, 0.0, 100.0)?;
        in_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        in_range("typical_p", self.typical_p, f32::MIN_POSITIVE, 1.0)?;
        in_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)?;
        in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        for &(id, bias) in &self.logit_bias {
            token_in("logit_bias", id, vocab_size)?;
            in_range("logit_bias", bias, -1e4, 1e4)?;
        }
        self.allowed_ids.iter().try_for_each(|&id| token_in("allowed_ids", id, vocab_size))?;
        if self.bad_words.iter().any(Vec::is_empty) {
            return Err(SamplingError::Empty { name: "bad_words" });
        }
        self.bad_words.iter().flatten().try_for_each(|&id| token_in("bad_words", id, vocab_size))?;
        self.logprob_ids.iter().try_for_each(|&id| token_in("logprob_ids", id, vocab_size))?;
        self.stop_ids.iter().try_for_each(|&id| token_in("stop_ids", id, vocab_size))
    }

    /// True if the token with the best logit is taken without a draw.
    pub fn is_greedy(&self) -> bool {
        // Below this the division would overflow long before a second candidate could be drawn (vLLM's bound).
        self.temperature < 1e-5
    }

    /// True if a draw may leave out tokens that have a weight.
    pub(crate) fn has_filters(&self) -> bool {
        self.min_p > 0.0 || self.top_k > 0 || self.top_p < 1.0 || self.typical_p < 1.0
    }

    /// True if a draw returns logprobs.
    pub(crate) fn has_logprobs(&self) -> bool {
        self.top_logprobs.is_some() || !self.logprob_ids.is_empty()
    }

    /// True if any penalty depends on the tokens so far.
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

fn in_range(name: &'static str, value: f32, min: f32, max: f32) -> Result<(), SamplingError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(SamplingError::OutOfRange { name, value: value.into(), min: min.into(), max: max.into() })
}

fn token_in(name: &'static str, id: u32, vocab_size: usize) -> Result<(), SamplingError> {
    if (id as usize) < vocab_size {
        return Ok(());
    }
    Err(SamplingError::Token { name, id: id.into(), vocab_size })
}
