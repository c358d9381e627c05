//! What differs between families, as rows of facts. A new family is a new row (and an op, if it needs one).

use crate::error::Unsupported;
use crate::model::slot::{FOLDER_NAMES, GGUF_NAMES, NameTable};

pub use crate::model::slot::{LayerSlot, Slot};

/// The facts of one family.
#[derive(Debug)]
pub struct FamilyFacts {
    /// `architectures[0]` of `config.json`.
    pub architecture: &'static str,
    /// `model_type` of `config.json`, used if it names no architecture.
    pub model_type: &'static str,
    /// `general.architecture` of a GGUF file.
    pub gguf_architecture: &'static str,
    /// The q, k and v projections add a bias.
    pub qkv_bias: bool,
    /// Query and key heads are normed before the rotation.
    pub qk_norm: bool,
    /// `head_dim` where `config.json` has none; None: `hidden_size / num_attention_heads`.
    pub d_head_default: Option<usize>,
    /// `sliding_window` counts only together with `use_sliding_window`.
    pub window_needs_switch: bool,
    /// Row order of q and k in a GGUF file.
    pub gguf_rope_rows: RopeRows,
    /// Names in a folder.
    pub folder_names: &'static NameTable,
    /// Names in a GGUF file.
    pub gguf_names: &'static NameTable,
}

/// In which order the rows of a head of q and k are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeRows {
    /// The pair of row `i` is row `i + d_head / 2`: our own order, and transformers'.
    HalfSplit,
    /// The pair of row `2i` is row `2i + 1`: what llama.cpp's converter makes of Llama checkpoints.
    Interleaved,
}

impl RopeRows {
    /// The stored row of row `n` in half-split order, of a matrix of whole heads of `d_head` rows.
    pub fn stored_row(self, n: usize, d_head: usize) -> usize {
        match self {
            RopeRows::HalfSplit => n,
            RopeRows::Interleaved => {
                let (head, row) = (n / d_head, n % d_head);
                let half = d_head / 2;
                head * d_head + 2 * (row % half) + row / half
            }
        }
    }
}

/// Llama and what shares its forward pass (SmolLM2).
pub const LLAMA: FamilyFacts = FamilyFacts {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    gguf_architecture: "llama",
    qkv_bias: false,
    qk_norm: false,
    d_head_default: None,
    window_needs_switch: false,
    gguf_rope_rows: RopeRows::Interleaved,
    folder_names: &FOLDER_NAMES,
    gguf_names: &GGUF_NAMES,
};

/// Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen.
pub const QWEN2: FamilyFacts = FamilyFacts {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    gguf_architecture: "qwen2",
    qkv_bias: true,
    window_needs_switch: true,
    gguf_rope_rows: RopeRows::HalfSplit,
    ..LLAMA
};

/// Qwen3, dense.
pub const QWEN3: FamilyFacts = FamilyFacts {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    gguf_architecture: "qwen3",
    qk_norm: true,
    d_head_default: Some(128),
    window_needs_switch: true,
    gguf_rope_rows: RopeRows::HalfSplit,
    ..LLAMA
};

/// Every family that runs.
pub static FAMILIES: [FamilyFacts; 3] = [LLAMA, QWEN2, QWEN3];

/// The family called `name` under one of the three spellings. Errors: none is; the message lists those that
/// are.
pub fn find(
    name: &str,
    spelling: fn(&FamilyFacts) -> &'static str,
) -> Result<&'static FamilyFacts, Unsupported> {
    let supported = || FAMILIES.iter().map(spelling).collect::<Vec<_>>().join(", ");
    let found = FAMILIES.iter().find(|family| spelling(family) == name);
    found.ok_or_else(|| Unsupported::Architecture { name: name.to_owned(), supported: supported() })
}
