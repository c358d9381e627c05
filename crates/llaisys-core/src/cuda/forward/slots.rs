//! The host's record of each running sequence's state on the device, so that only differences are uploaded.

use crate::sample::SamplerSpec;

/// The record of one slot. At first nothing of it is on the device.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Set while its cells on the device are the sequence's.
    pub(super) synced: Option<Synced>,
    /// The sampling of its sequence; `None`: greedy.
    pub(super) sampling: Option<Sampling>,
    /// The part of it that the device has; `None`: nothing, or another sequence's.
    pub(super) attached: Option<Attached>,
}

/// The state of a slot after the last launched step, recorded before its launch. It is valid only for a row at the next
/// position: after a dropped or rolled-back row the same position comes again and does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Synced {
    /// Number of cells; the next token's is appended there.
    pub(super) length: usize,
    /// The next token's position minus `length`.
    pub(super) base: i64,
    /// The token that has no cell yet, unless a step in flight replaces it.
    pub(super) last_token: u32,
}

/// The sampling of a sequence.
#[derive(Debug)]
pub(super) struct Sampling {
    pub(super) spec: SamplerSpec,
    pub(super) n_prompt: usize,
    /// The prompt, then the completion.
    pub(super) tokens: Vec<i32>,
    /// Whether it fits the device's tables.
    pub(super) fits: bool,
}

/// The state of a slot in the device's sampling tables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attached {
    /// Tokens of the sequence in its row.
    pub(super) n_tokens: usize,
    /// The kernel reads its mask.
    pub(super) masked: bool,
}

impl Slot {
    /// Returns whether the device can sample the token after `position`: the sampling fits its tables, and the tokens that
    /// penalties read are those of the positions up to it.
    pub(super) fn can_sample_after(&self, position: u32) -> bool {
        let follows = |sampling: &Sampling| {
            sampling.fits
                && sampling.tokens.len() == position as usize + 1
                && sampling.tokens.len() >= sampling.n_prompt
        };
        self.sampling.as_ref().is_none_or(follows)
    }

    /// Returns whether the device's tables are up to date for the next step of the sequence.
    pub(super) fn is_attached(&self, masked: bool) -> bool {
        self.attached.is_some_and(|attached| {
            let up_to_date = self.sampling.as_ref().is_none_or(|s| s.tokens.len() == attached.n_tokens);
            up_to_date && (attached.masked || !masked)
        })
    }

    /// Returns the number of top logprobs that the sequence wants, if it wants any.
    pub(super) fn n_top(&self) -> Option<u32> {
        self.sampling.as_ref().and_then(|sampling| sampling.spec.top_logprobs)
    }

    /// Appends `token` to the completion.
    pub(super) fn append_token(&mut self, token: u32) {
        if let Some(sampling) = &mut self.sampling {
            sampling.tokens.push(token as i32);
        }
    }

    /// Records that the device sampled a token and appended it to the sequence's row.
    pub(super) fn sampled(&mut self, token: u32) {
        if let Some(synced) = &mut self.synced {
            synced.last_token = token;
        }
        if let Some(attached) = &mut self.attached {
            attached.n_tokens += 1;
        }
    }
}
