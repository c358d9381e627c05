//! The values of an architecture's properties.

use crate::ops::{ClampedSilu, Gate, HeadWidths};

/// Activation of the gate of the feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
    /// The tanh form of gelu.
    GeluTanh,
    /// Silu with bounds of gate and up; `config.json` can state them.
    ClampedSilu,
}

impl Activation {
    /// The gate where the file states no numbers.
    pub fn gate(self) -> Gate {
        match self {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
            // transformers' defaults in gpt-oss.
            Activation::ClampedSilu => Gate::ClampedSilu(ClampedSilu { limit: 7.0, alpha: 1.702 }),
        }
    }
}

/// How queries and keys are normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Not at all.
    None,
    /// Each head by itself, before the rotary embedding.
    Head,
    /// Each head by itself, after the rotary embedding.
    RotatedHead,
    /// The whole projection, all heads together, before the rotary embedding.
    Projection,
}

/// The scale of attention scores as a divisor under a square root: `query_pre_attn_scalar` of `config.json`. A GGUF
/// file has no key for it; it follows from the sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryScalar {
    /// Default where `config.json` has none.
    pub default: usize,
    /// The number of layers of the one model size where the scalar is `d_model / n_heads`; it is `d_head` in the
    /// others.
    pub layers_by_width: usize,
}

/// Where a soft cap comes from: `cap * tanh(x / cap)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SoftCap {
    /// The architecture has none; a file with one is rejected.
    Unsupported,
    /// The file has it (null: none); this is the default.
    Stated(Option<f64>),
}

/// Which layers have a sliding window where `layer_types` is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowRule {
    /// The architecture has none; a file with one is rejected.
    Unsupported,
    /// All layers, with `sliding_window` or this default.
    All(Option<usize>),
    /// The layers from `max_window_layers` on, if `use_sliding_window` is true.
    SwitchedFromLayer,
    /// All layers, if `use_sliding_window` is true.
    Switched,
    /// All layers except every n-th; layer `n - 1` is the first without a window.
    AllButEvery(usize),
}

/// Keys of a mixture of experts in `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertKeys {
    /// The number of experts of a layer.
    pub n: &'static str,
    /// Inner width of one expert.
    pub d_ff: &'static str,
    /// Experts that are used for a token.
    pub n_used: &'static str,
    /// Whether the weights of the chosen experts are scaled to a sum of 1; None: always. In a GGUF file the default
    /// is true.
    pub normalize: Option<&'static str>,
    /// Whether they are where the key is absent.
    pub normalize_default: bool,
    /// Scores are sigmoids, the router has a bias, and the first layers are dense: keys of LFM2 are read.
    pub sigmoid: bool,
    /// The router and the matrices of experts add biases.
    pub projection_biases: bool,
}

impl ExpertKeys {
    /// A mixture in every layer, with the softmax of the router's logits as scores.
    pub(super) const SOFTMAX: Self = Self {
        n: "num_experts",
        d_ff: "moe_intermediate_size",
        n_used: "num_experts_per_tok",
        normalize: None,
        normalize_default: false,
        sigmoid: false,
        projection_biases: false,
    };
}

/// The order in which the rotated rows of a head of q and k are stored. Rows that are not rotated follow them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeRows {
    /// The pair of row `i` is row `i + d_rope / 2`: the order of this crate and of most folders.
    HalfSplit,
    /// The pair of row `2i` is row `2i + 1`: the order that llama.cpp's converter writes for Llama checkpoints, and that
    /// of some folders.
    Interleaved,
}

impl RopeRows {
    /// The stored row of row `n` in half-split order. The matrix consists of whole heads.
    pub fn stored_row(self, n: usize, widths: HeadWidths) -> usize {
        let HeadWidths { d_head, d_rope } = widths;
        let (head, row) = (n / d_head, n % d_head);
        match self {
            RopeRows::Interleaved if row < d_rope => {
                let half = d_rope / 2;
                head * d_head + 2 * (row % half) + row / half
            }
            RopeRows::Interleaved | RopeRows::HalfSplit => n,
        }
    }
}
