//! What only Gemma 4 has: two kinds of heads, layers that read the keys and values of earlier ones, feed-forward blocks
//! of two widths, and an input of each layer.

use crate::arch::weight_id::Gemma4Weight;
use crate::error::Unsupported;
use crate::ops::KvHeads;

/// The sizes of a Gemma 4 model that other architectures do not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gemma4 {
    /// Heads of the layers without a window. `d_head` and `n_kv_heads` of the configuration are those of the others.
    pub full_heads: KvHeads,
    /// Values of the layers without a window are made of the key projection.
    pub values_are_keys: bool,
    /// The last layers, which read the keys and values of the last earlier layer of their kind.
    pub n_shared: usize,
    /// Their feed-forward blocks are twice as wide.
    pub widens_shared: bool,
    /// Width of the input of each layer that depends on the token; 0: layers have none.
    pub d_input: usize,
    /// Tokens that stand for images, sound and video.
    pub placeholders: Placeholders,
}

/// Tokens of a multimodal checkpoint that have the embedding of another one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Placeholders {
    /// These tokens.
    pub ids: [Option<u32>; 3],
    /// The token whose embedding they have.
    pub embeds_as: u32,
}

impl Placeholders {
    /// The token whose embedding `token` has.
    pub fn embedded(&self, token: i32) -> i32 {
        let is_placeholder = u32::try_from(token).is_ok_and(|token| self.ids.contains(&Some(token)));
        if is_placeholder { self.embeds_as as i32 } else { token }
    }

    /// True if no token stands for another one.
    pub fn is_empty(&self) -> bool {
        self.ids.iter().all(Option::is_none)
    }
}

impl Gemma4 {
    /// True if a layer with or without experts has this weight.
    pub(super) fn has(&self, part: Gemma4Weight, has_experts: bool) -> bool {
        use Gemma4Weight::{InputGate, InputNorm, InputProjection, Scalar};
        match part {
            Scalar => true,
            InputGate | InputProjection | InputNorm => self.d_input > 0,
            _ => has_experts,
        }
    }

    /// Checks that each layer which reads another one has an earlier one of its kind, and that the last layer sees all
    /// positions, as transformers makes it. Errors: [`Unsupported`].
    pub(crate) fn check_layers(&self, windowed: &[bool]) -> Result<(), Unsupported> {
        let (own, shared) = windowed.split_at(windowed.len() - self.n_shared);
        if let Some(lonely) = shared.iter().position(|kind| !own.contains(kind)) {
            let value = format!("{} of {}, layer {}", self.n_shared, windowed.len(), own.len() + lonely);
            let supported = "layers with an earlier one of their kind that is not shared";
            return Err(Unsupported::feature("num_kv_shared_layers", value, supported));
        }
        if windowed.last() == Some(&true) {
            let (what, value) = ("the type of the last layer", "sliding_attention");
            return Err(Unsupported::feature(what, value, "full_attention"));
        }
        Ok(())
    }
}
