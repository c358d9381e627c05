//! What differs between families, as rows of facts. A new family is a new row (and an op, if it needs one).

use crate::error::Unsupported;
use crate::model::slot::{
    FOLDER_NAMES, FOUR_NORM_FOLDER_NAMES, FUSED_FOLDER_NAMES, FUSED_GGUF_NAMES, GGUF_NAMES,
    MIXTRAL_FOLDER_NAMES, NameTable,
};

pub use crate::model::slot::{ExpertPart, LayerSlot, Slot};

/// The facts of one family.
#[derive(Debug)]
pub struct FamilyFacts {
    /// `architectures[0]` of `config.json`.
    pub architecture: &'static str,
    /// `model_type` of `config.json`, used if it names no architecture.
    pub model_type: &'static str,
    /// `general.architecture` of a GGUF file. Where several rows share it, the first with the same answer to
    /// "experts?" is meant.
    pub gguf_architecture: &'static str,
    /// The q, k and v projections add a bias.
    pub qkv_bias: bool,
    /// Queries and keys are normed before the rotation.
    pub qk_norm: QkNorm,
    /// What attention and the feed-forward part read is normed.
    pub pre_norms: bool,
    /// What attention and the feed-forward part add to the residual stream is normed.
    pub post_norms: bool,
    /// A folder stores a norm's weights less this much; a GGUF file stores them whole.
    pub folder_norm_offset: f32,
    /// Of the gate.
    pub activation: Activation,
    /// `head_dim` where `config.json` has none; None: `hidden_size / num_attention_heads`.
    pub d_head_default: Option<usize>,
    /// The head is tied where `config.json` does not say.
    pub tied_default: bool,
    /// Embeddings are multiplied by `sqrt(d_model)`.
    pub embed_sqrt: bool,
    /// `config.json` states what embeddings, scores, residual branches and logits are multiplied with.
    pub multipliers: bool,
    /// Which scale of scores is not `1 / sqrt(d_head)`.
    pub query_scalar: Option<QueryScalar>,
    /// The soft cap of attention scores.
    pub attn_soft_cap: SoftCap,
    /// The soft cap of logits.
    pub logit_soft_cap: SoftCap,
    /// Which layers have a sliding window.
    pub window: WindowRule,
    /// Base of the rotation in layers with a window, where it is another than in the others.
    pub local_theta: Option<f64>,
    /// Keys of a mixture of experts in `config.json`; None: a dense model.
    pub experts: Option<ExpertKeys>,
    /// Row order of q and k in a GGUF file.
    pub gguf_rope_rows: RopeRows,
    /// Names in a folder.
    pub folder_names: &'static NameTable,
    /// Names in a GGUF file.
    pub gguf_names: &'static NameTable,
}

/// What the gate of the feed-forward part goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`
    Silu,
    /// The tanh form of gelu.
    GeluTanh,
}

/// What is normed of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Nothing.
    None,
    /// Each head.
    Head,
    /// The whole projection, all heads together.
    Projection,
}

/// How `config.json` (`query_pre_attn_scalar`, whose root divides scores) and a GGUF file, which has no key
/// for it, give the scale of scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryScalar {
    /// Where `config.json` states none.
    pub default: usize,
    /// Layers of the one size of the family whose scalar is `d_model / n_heads`; the others': `d_head`.
    pub layers_by_width: usize,
}

/// Where a soft cap comes from: `cap * tanh(x / cap)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SoftCap {
    /// The family has none; a file that states one is refused.
    Refused,
    /// The file states it (null: none); else this.
    Stated(Option<f64>),
}

/// Which layers have a sliding window where `layer_types` does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowRule {
    /// The family has none; a file that states one is refused.
    Refused,
    /// All, if `sliding_window` is stated; where it is not, this one.
    All(Option<usize>),
    /// Those from `max_window_layers` on, if `use_sliding_window` is true.
    SwitchedFromLayer,
    /// All, if `use_sliding_window` is true.
    Switched,
    /// All but every n-th, the n-th being the first without.
    AllButEvery(usize),
}

/// Keys of a mixture of experts in `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertKeys {
    /// Experts of a layer.
    pub n: &'static str,
    /// Inner width of one.
    pub d_ff: &'static str,
    /// Whether the weights of the chosen experts are scaled to a sum of 1; None: they always are. In a GGUF
    /// file they are unless it says otherwise.
    pub normalise: Option<&'static str>,
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

/// Llama 2 and 3 and what shares their forward pass (SmolLM2).
pub const LLAMA: FamilyFacts = FamilyFacts {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    gguf_architecture: "llama",
    qkv_bias: false,
    qk_norm: QkNorm::None,
    pre_norms: true,
    post_norms: false,
    folder_norm_offset: 0.0,
    activation: Activation::Silu,
    d_head_default: None,
    tied_default: false,
    embed_sqrt: false,
    multipliers: false,
    query_scalar: None,
    attn_soft_cap: SoftCap::Refused,
    logit_soft_cap: SoftCap::Refused,
    window: WindowRule::Refused,
    local_theta: None,
    experts: None,
    gguf_rope_rows: RopeRows::Interleaved,
    folder_names: &FOLDER_NAMES,
    gguf_names: &GGUF_NAMES,
};

/// Mistral. Its GGUF files call themselves llama.
pub const MISTRAL: FamilyFacts = FamilyFacts {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    window: WindowRule::All(Some(4096)),
    ..LLAMA
};

/// Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen.
pub const QWEN2: FamilyFacts = FamilyFacts {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    gguf_architecture: "qwen2",
    qkv_bias: true,
    window: WindowRule::SwitchedFromLayer,
    gguf_rope_rows: RopeRows::HalfSplit,
    ..LLAMA
};

/// Qwen3, dense.
pub const QWEN3: FamilyFacts = FamilyFacts {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    gguf_architecture: "qwen3",
    qk_norm: QkNorm::Head,
    d_head_default: Some(128),
    window: WindowRule::SwitchedFromLayer,
    gguf_rope_rows: RopeRows::HalfSplit,
    ..LLAMA
};

/// Phi-3 and 3.5.
pub const PHI3: FamilyFacts = FamilyFacts {
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    gguf_architecture: "phi3",
    window: WindowRule::All(None),
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &FUSED_FOLDER_NAMES,
    gguf_names: &FUSED_GGUF_NAMES,
    ..LLAMA
};

/// OLMo 2.
pub const OLMO2: FamilyFacts = FamilyFacts {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    gguf_architecture: "olmo2",
    qk_norm: QkNorm::Projection,
    pre_norms: false,
    post_norms: true,
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &FOUR_NORM_FOLDER_NAMES,
    ..LLAMA
};

/// Granite 3, dense.
pub const GRANITE: FamilyFacts = FamilyFacts {
    architecture: "GraniteForCausalLM",
    model_type: "granite",
    gguf_architecture: "granite",
    multipliers: true,
    ..LLAMA
};

/// Gemma 2.
pub const GEMMA2: FamilyFacts = FamilyFacts {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    gguf_architecture: "gemma2",
    post_norms: true,
    folder_norm_offset: 1.0,
    activation: Activation::GeluTanh,
    d_head_default: Some(256),
    tied_default: true,
    embed_sqrt: true,
    query_scalar: Some(QueryScalar { default: 256, layers_by_width: 46 }),
    attn_soft_cap: SoftCap::Stated(Some(50.0)),
    logit_soft_cap: SoftCap::Stated(Some(30.0)),
    window: WindowRule::AllButEvery(2),
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &FOUR_NORM_FOLDER_NAMES,
    ..LLAMA
};

/// Gemma 3, the text model.
pub const GEMMA3: FamilyFacts = FamilyFacts {
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    gguf_architecture: "gemma3",
    qk_norm: QkNorm::Head,
    query_scalar: Some(QueryScalar { default: 256, layers_by_width: 62 }),
    attn_soft_cap: SoftCap::Refused,
    logit_soft_cap: SoftCap::Stated(None),
    window: WindowRule::AllButEvery(6),
    local_theta: Some(1e4),
    ..GEMMA2
};

/// Mixtral. Its GGUF files call themselves llama.
pub const MIXTRAL: FamilyFacts = FamilyFacts {
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    window: WindowRule::All(None),
    experts: Some(ExpertKeys { n: "num_local_experts", d_ff: "intermediate_size", normalise: None }),
    folder_names: &MIXTRAL_FOLDER_NAMES,
    ..LLAMA
};

/// Qwen3 with a mixture of experts in every layer.
pub const QWEN3_MOE: FamilyFacts = FamilyFacts {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    gguf_architecture: "qwen3moe",
    window: WindowRule::Switched,
    experts: Some(ExpertKeys {
        n: "num_experts",
        d_ff: "moe_intermediate_size",
        normalise: Some("norm_topk_prob"),
    }),
    ..QWEN3
};

/// Every family that runs.
pub static FAMILIES: [FamilyFacts; 11] =
    [LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GRANITE, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE];

/// The family called `name` under one of the three spellings. Errors: none is; the message lists those that
/// are.
pub fn find(
    name: &str,
    spelling: fn(&FamilyFacts) -> &'static str,
) -> Result<&'static FamilyFacts, Unsupported> {
    let found = FAMILIES.iter().find(|family| spelling(family) == name);
    found.ok_or_else(|| {
        let mut names: Vec<&str> = FAMILIES.iter().map(spelling).collect();
        names.dedup();
        Unsupported::Architecture { name: name.to_owned(), supported: names.join(", ") }
    })
}

/// The row of a GGUF architecture with or without experts. Errors: as [`find`]; no such row, by name.
pub fn find_gguf(name: &str, n_experts: usize) -> Result<&'static FamilyFacts, Unsupported> {
    let first = find(name, |family| family.gguf_architecture)?;
    let mut rows = FAMILIES.iter().filter(|family| family.gguf_architecture == first.gguf_architecture);
    rows.find(|family| family.experts.is_some() == (n_experts > 0)).ok_or_else(|| Unsupported::Feature {
        what: "a mixture of experts",
        value: format!("{name}.expert_count = {n_experts}"),
        supported: if first.experts.is_some() { "models with experts" } else { "dense models" },
    })
}
