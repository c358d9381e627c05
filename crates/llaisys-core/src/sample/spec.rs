//! The sampling parameters of one sequence, checked once.

use crate::error::SamplingError;

/// What one sequence asks of the sampler. Neutral values switch a rule off; the defaults are neutral.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerSpec {
    /// Divides the logits; 0 is greedy. In `0..=100`.
    pub temperature: f32,
    /// Keep the `k` best; 0 keeps all.
    pub top_k: u32,
    /// Keep the best until their probabilities reach this. In `(0, 1]`.
    pub top_p: f32,
    /// Keep what has at least this share of the best one's probability. In `[0, 1]`.
    pub min_p: f32,
    /// Locally typical sampling (Meister et al., arXiv:2202.00666): keep the tokens whose surprise is nearest to
    /// the entropy until their probabilities reach this. In `(0, 1]`.
    pub typical_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer (arXiv:1909.05858). Above 0.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens in the answer. In `[-2, 2]`.
    pub presence_penalty: f32,
    /// Subtracted from tokens in the answer, times their count. In `[-2, 2]`.
    pub frequency_penalty: f32,
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Only these ids may be drawn; empty: all.
    pub allowed_ids: Vec<u32>,
    /// Token sequences that the answer must not hold: the last token of each is forbidden where the ones before it
    /// are the newest of the answer.
    pub bad_words: Vec<Vec<u32>>,
    /// `stop_ids` cannot be drawn before so many tokens are out.
    pub min_tokens: u32,
    /// Ids held back by `min_tokens`.
    pub stop_ids: Vec<u32>,
    /// Key of the draws.
    pub seed: u64,
    /// Which of a request's `n` answers this is.
    pub choice: u32,
    /// Logprobs wanted: `None`, or the drawn token's and so many best ones.
    pub top_logprobs: Option<u32>,
    /// Rows inside the prompt that want logits give, in place of a draw, the prompt's next token with its logprob
    /// and so many best ones. `None`: such rows are sampled as any other.
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
            prompt_logprobs: None,
        }
    }
}

impl SamplerSpec {
    /// Checks every bound. NaN is out of every range.
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
        self.stop_ids.iter().try_for_each(|&id| token_in("stop_ids", id, vocab_size))
    }

    /// True if the best logit is taken without a draw.
    pub fn is_greedy(&self) -> bool {
        // Below this the division would overflow long before a second candidate gets a chance (vLLM's bound).
        self.temperature < 1e-5
    }

    /// True if any penalty looks at the tokens so far.
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
