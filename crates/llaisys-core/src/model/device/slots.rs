//! What the device has of each running sequence, as the host knows it: so that only what differs is uploaded.

use crate::sample::SamplerSpec;

/// One slot of the host's books. Nothing of it is known to be on the device at first.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Its cells on the device are the sequence's; `None`: they may be others.
    pub(super) synced: Option<Synced>,
    /// What its sequence asks of sampling; `None`: the best token.
    pub(super) sampling: Option<Sampling>,
    /// What of that the device has; `None`: of another sequence, or nothing.
    pub(super) attached: Option<Attached>,
}

/// The state of a slot after the last launched step, noted before its launch. A row finds it so only if its position is
/// the next one: where a step's row was lost or taken back, that position comes again and does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Synced {
    /// Cells, which is where the next token's is appended.
    pub(super) length: usize,
    /// Position of the next token less that.
    pub(super) base: i64,
    /// The token that has no cell yet, unless a step is under way that gives another.
    pub(super) last_token: u32,
}

/// The sampling of a sequence.
#[derive(Debug)]
pub(super) struct Sampling {
    pub(super) spec: SamplerSpec,
    pub(super) n_prompt: usize,
    /// The prompt, then the answer.
    pub(super) tokens: Vec<i32>,
    /// Whether the device's tables hold what it asks for.
    pub(super) fits: bool,
}

/// What the device's tables have of a slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attached {
    /// Tokens of the sequence in its row.
    pub(super) n_tokens: usize,
    /// It looks at its mask.
    pub(super) masked: bool,
}

impl Slot {
    /// Whether the device can sample what comes after `position`: its tables hold what the sequence asks for, and the
    /// tokens that rules look at are those of the positions up to it.
    pub(super) fn is_sampled_after(&self, position: u32) -> bool {
        let follows = |sampling: &Sampling| {
            sampling.fits
                && sampling.tokens.len() == position as usize + 1
                && sampling.tokens.len() >= sampling.n_prompt
        };
        self.sampling.as_ref().is_none_or(follows)
    }

    /// Whether the device's tables have what the next step of the sequence needs.
    pub(super) fn is_attached(&self, masked: bool) -> bool {
        self.attached.is_some_and(|attached| {
            let up_to_date = self.sampling.as_ref().is_none_or(|s| s.tokens.len() == attached.n_tokens);
            up_to_date && (attached.masked || !masked)
        })
    }

    /// Best tokens that are wanted with logprobs, if those are.
    pub(super) fn n_top(&self) -> Option<u32> {
        self.sampling.as_ref().and_then(|sampling| sampling.spec.top_logprobs)
    }

    /// The sequence got `token`.
    pub(super) fn accept(&mut self, token: u32) {
        if let Some(sampling) = &mut self.sampling {
            sampling.tokens.push(token as i32);
        }
    }

    /// The device sampled a token, which it added to the row of the sequence.
    pub(super) fn sampled(&mut self, token: u32) {
        if let Some(synced) = &mut self.synced {
            synced.last_token = token;
        }
        if let Some(attached) = &mut self.attached {
            attached.n_tokens += 1;
        }
    }
}
