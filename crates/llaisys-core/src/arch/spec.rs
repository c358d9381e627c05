//! The differences between architectures: a table with one row for each. A new architecture needs a new row, and an op
//! if no existing one fits.

mod gemma;
mod gpt_oss;
mod liquid;
mod qwen;
mod rules;

use crate::arch::bias::{Bias, Biases};
use crate::arch::recurrent::RecurrentKind;
use crate::arch::rope::{LocalRope, RopeRules};
use crate::arch::weight_id::{
    FOLDER_NAMES, FOUR_NORM_FOLDER_NAMES, FUSED_FOLDER_NAMES, FUSED_GGUF_NAMES, GGUF_NAMES,
    GLM4_FOLDER_NAMES, GLM4_GGUF_NAMES, GRANITE_HYBRID_FOLDER_NAMES, HUNYUAN_FOLDER_NAMES,
    MIXTRAL_FOLDER_NAMES, NameTable, SEED_OSS_GGUF_NAMES,
};
use crate::error::Unsupported;
use crate::ops::ValueOrder;

pub use gemma::{GEMMA2, GEMMA3, GEMMA4, GEMMA4_MOE};
pub use gpt_oss::GPT_OSS;
pub use liquid::{LFM2, LFM2_MOE};
pub use qwen::{QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT};
pub use rules::{Activation, ExpertKeys, QkNorm, QueryScalar, RopeRows, SoftCap, WindowRule};

pub use crate::arch::weight_id::{
    DeltaWeight, ExpertPart, Gemma4Weight, LayerInputWeight, LayerWeight, ShortConvWeight, WeightId,
};

/// The properties of one architecture that the forward pass and the loaders use.
#[derive(Debug)]
pub struct ArchSpec {
    /// `architectures[0]` of `config.json`.
    pub architecture: &'static str,
    /// `model_type` of `config.json`, used if it names no architecture.
    pub model_type: &'static str,
    /// `general.architecture` of a GGUF file. Of several rows that share it, the first one applies that has experts
    /// exactly if the model has; one with windows in some layers precedes it if the file has a window.
    pub gguf_architecture: &'static str,
    /// Which projections add a bias.
    pub biases: Biases,
    /// How queries and keys are normalized.
    pub qk_norm: QkNorm,
    /// The inputs of attention and of the feed-forward block are normalized.
    pub pre_norms: bool,
    /// The outputs of attention and of the feed-forward block are normalized before they join the residual stream.
    pub post_norms: bool,
    /// Subtracted from the weights of norms in a folder; a GGUF file stores them as they are.
    pub folder_norm_offset: f32,
    /// Activation of the gate.
    pub activation: Activation,
    /// `head_dim` where `config.json` has none; None: `hidden_size / num_attention_heads`.
    pub d_head_default: Option<usize>,
    /// The key of the epsilon of the norms in `config.json`.
    pub rms_eps_key: &'static str,
    /// The epsilon where `config.json` has none.
    pub rms_eps_default: f64,
    /// The keys that state in `config.json` whether the head is tied, the one that takes precedence first.
    pub tied_keys: &'static [&'static str],
    /// Whether the head is tied where `config.json` does not state it.
    pub tied_default: bool,
    /// Embeddings are multiplied by `sqrt(d_model)`.
    pub embed_sqrt: bool,
    /// `config.json` has multipliers of embeddings, scores, residual branches and logits.
    pub multipliers: bool,
    /// The scale of attention scores where it is not `1 / sqrt(d_head)`.
    pub query_scalar: Option<QueryScalar>,
    /// Each head has a sink: a logit that joins the sum of the softmax's weights.
    pub attn_sinks: bool,
    /// The soft cap of attention scores.
    pub attn_soft_cap: SoftCap,
    /// The soft cap of logits.
    pub logit_soft_cap: SoftCap,
    /// Which layers have a sliding window.
    pub window: WindowRule,
    /// How queries and keys are rotated.
    pub rope: RopeRules,
    /// A dynamic rotary embedding has `alpha`, which stretches its base once.
    pub rope_alpha: bool,
    /// `config.json` switches the rotary embedding on with `position_embedding_type`.
    pub rope_switch: bool,
    /// The key of the inner width of a dense feed-forward block in `config.json`.
    pub d_ff_key: &'static str,
    /// The keys by which that width is adjusted are read.
    pub adjusts_d_ff: bool,
    /// The keys of a mixture of experts in `config.json`; None for a dense model.
    pub experts: Option<ExpertKeys>,
    /// Layers have two kinds of heads, normalized values, a factor of their output, and what else
    /// [`Gemma4`](crate::arch::gemma4::Gemma4) states.
    pub gemma4: bool,
    /// The kind of the layers that are recurrent instead of attention.
    pub recurrent: Option<RecurrentKind>,
    /// The order of value heads of recurrent layers in a GGUF file.
    pub gguf_value_order: ValueOrder,
    /// Every mixture of experts has an expert that all tokens use.
    pub shared_expert: bool,
    /// Row order of q and k in a folder.
    pub folder_rope_rows: RopeRows,
    /// Row order of q and k in a GGUF file.
    pub gguf_rope_rows: RopeRows,
    /// Tokens that end a completion in a GGUF file, whose keys do not name all of them, or name one that ends only a
    /// part. Empty: those of the keys.
    pub gguf_end_tokens: &'static [&'static str],
    /// Names in a folder.
    pub folder_names: &'static NameTable,
    /// Names in a GGUF file.
    pub gguf_names: &'static NameTable,
}

/// Llama 2 and 3, and models with the same forward pass (SmolLM2).
pub const LLAMA: ArchSpec = ArchSpec {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    gguf_architecture: "llama",
    biases: Biases::LLAMA,
    qk_norm: QkNorm::None,
    pre_norms: true,
    post_norms: false,
    folder_norm_offset: 0.0,
    activation: Activation::Silu,
    d_head_default: None,
    rms_eps_key: "rms_norm_eps",
    rms_eps_default: 1e-6,
    tied_keys: &["tie_word_embeddings"],
    tied_default: false,
    embed_sqrt: false,
    multipliers: false,
    query_scalar: None,
    attn_sinks: false,
    attn_soft_cap: SoftCap::Unsupported,
    logit_soft_cap: SoftCap::Unsupported,
    window: WindowRule::Unsupported,
    rope: RopeRules::PLAIN,
    rope_alpha: false,
    rope_switch: false,
    d_ff_key: "intermediate_size",
    adjusts_d_ff: false,
    experts: None,
    gemma4: false,
    recurrent: None,
    gguf_value_order: ValueOrder::Grouped,
    shared_expert: false,
    folder_rope_rows: RopeRows::HalfSplit,
    gguf_rope_rows: RopeRows::Interleaved,
    gguf_end_tokens: &[],
    folder_names: &FOLDER_NAMES,
    gguf_names: &GGUF_NAMES,
};

/// Mistral. The architecture of its GGUF files is "llama".
pub const MISTRAL: ArchSpec = ArchSpec {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    biases: Biases::NONE,
    window: WindowRule::All(Some(4096)),
    ..LLAMA
};

/// Phi-3, 3.5 and Phi-4-mini.
pub const PHI3: ArchSpec = ArchSpec {
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    gguf_architecture: "phi3",
    rms_eps_default: 1e-5,
    biases: Biases::NONE,
    window: WindowRule::All(None),
    rope: RopeRules { partial_default: Some(1.0), ..RopeRules::PLAIN },
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &FUSED_FOLDER_NAMES,
    gguf_names: &FUSED_GGUF_NAMES,
    ..LLAMA
};

/// OLMo 2.
pub const OLMO2: ArchSpec = ArchSpec {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    gguf_architecture: "olmo2",
    biases: Biases::ATTENTION,
    qk_norm: QkNorm::Projection,
    pre_norms: false,
    post_norms: true,
    rms_eps_default: 1e-5,
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &FOUR_NORM_FOLDER_NAMES,
    ..LLAMA
};

/// OLMo 3. Its GGUF files are those of OLMo 2 with a window.
pub const OLMO3: ArchSpec = ArchSpec {
    architecture: "Olmo3ForCausalLM",
    model_type: "olmo3",
    window: WindowRule::AllButEvery(4),
    rope: RopeRules { theta_default: 5e5, local: LocalRope::Unscaled, ..RopeRules::PLAIN },
    ..OLMO2
};

/// SmolLM3.
pub const SMOLLM3: ArchSpec = ArchSpec {
    architecture: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    gguf_architecture: "smollm3",
    tied_default: true,
    rope: RopeRules { theta_default: 2e6, unrotated_every: Some(4), ..RopeRules::PLAIN },
    ..LLAMA
};

/// Ministral 3, the text model.
pub const MINISTRAL3: ArchSpec = ArchSpec {
    architecture: "Ministral3ForCausalLM",
    model_type: "ministral3",
    gguf_architecture: "mistral3",
    biases: Biases::NONE,
    d_head_default: Some(128),
    rms_eps_default: 1e-5,
    window: WindowRule::All(None),
    rope: RopeRules { theta_default: 1e6, scaled_queries: true, ..RopeRules::PLAIN },
    ..LLAMA
};

/// GLM-4 0414, dense.
pub const GLM4: ArchSpec = ArchSpec {
    architecture: "Glm4ForCausalLM",
    model_type: "glm4",
    gguf_architecture: "glm4",
    biases: Biases { o: Bias::Never, ..Biases::ATTENTION },
    post_norms: true,
    d_head_default: Some(128),
    rms_eps_default: 1.5625e-7,
    rope: RopeRules { partial_default: Some(0.5), ..RopeRules::PLAIN },
    folder_rope_rows: RopeRows::Interleaved,
    folder_names: &GLM4_FOLDER_NAMES,
    gguf_names: &GLM4_GGUF_NAMES,
    ..LLAMA
};

/// ERNIE 4.5, dense.
pub const ERNIE4_5: ArchSpec = ArchSpec {
    architecture: "Ernie4_5ForCausalLM",
    model_type: "ernie4_5",
    gguf_architecture: "ernie4_5",
    biases: Biases::ERNIE,
    d_head_default: Some(128),
    rms_eps_default: 1e-5,
    tied_default: true,
    rope: RopeRules { theta_default: 5e5, ..RopeRules::PLAIN },
    folder_rope_rows: RopeRows::Interleaved,
    ..LLAMA
};

/// Granite 3 and 4.1, dense.
pub const GRANITE: ArchSpec = ArchSpec {
    architecture: "GraniteForCausalLM",
    model_type: "granite",
    gguf_architecture: "granite",
    multipliers: true,
    ..LLAMA
};

/// Granite 4.0 whose layers are all of attention, without experts. Its GGUF files are those of Granite.
pub const GRANITE_HYBRID: ArchSpec = ArchSpec {
    architecture: "GraniteMoeHybridForCausalLM",
    model_type: "granitemoehybrid",
    biases: Biases::ATTENTION,
    rope_switch: true,
    d_ff_key: "shared_intermediate_size",
    folder_names: &GRANITE_HYBRID_FOLDER_NAMES,
    ..GRANITE
};

/// Seed-OSS.
pub const SEED_OSS: ArchSpec = ArchSpec {
    architecture: "SeedOssForCausalLM",
    model_type: "seed_oss",
    gguf_architecture: "seed_oss",
    biases: Biases::SEED_OSS,
    d_head_default: Some(128),
    gguf_rope_rows: RopeRows::HalfSplit,
    gguf_names: &SEED_OSS_GGUF_NAMES,
    ..LLAMA
};

/// Hunyuan, dense.
pub const HUNYUAN_DENSE: ArchSpec = ArchSpec {
    architecture: "HunYuanDenseV1ForCausalLM",
    model_type: "hunyuan_v1_dense",
    gguf_architecture: "hunyuan-dense",
    biases: Biases::ATTENTION,
    qk_norm: QkNorm::RotatedHead,
    rope_alpha: true,
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &HUNYUAN_FOLDER_NAMES,
    ..LLAMA
};

/// Mixtral. The architecture of its GGUF files is "llama".
pub const MIXTRAL: ArchSpec = ArchSpec {
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    rms_eps_default: 1e-5,
    biases: Biases::NONE,
    window: WindowRule::All(None),
    rope: RopeRules { theta_default: 1e6, ..RopeRules::PLAIN },
    experts: Some(ExpertKeys { n: "num_local_experts", d_ff: "intermediate_size", ..ExpertKeys::SOFTMAX }),
    folder_names: &MIXTRAL_FOLDER_NAMES,
    ..LLAMA
};

/// Every supported architecture.
pub static ARCHITECTURES: [ArchSpec; 27] = [
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    OLMO2,
    OLMO3,
    SMOLLM3,
    MINISTRAL3,
    GLM4,
    ERNIE4_5,
    GRANITE,
    GRANITE_HYBRID,
    SEED_OSS,
    HUNYUAN_DENSE,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_MOE,
    MIXTRAL,
    QWEN3_MOE,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    LFM2,
    LFM2_MOE,
    GPT_OSS,
];

/// Returns the architecture called `name` in one of the three spellings. Errors: there is none; the message lists the
/// supported ones.
pub fn find(name: &str, spelling: fn(&ArchSpec) -> &'static str) -> Result<&'static ArchSpec, Unsupported> {
    let found = ARCHITECTURES.iter().find(|arch| spelling(arch) == name);
    found.ok_or_else(|| {
        let mut names: Vec<&str> = ARCHITECTURES.iter().map(spelling).collect();
        names.dedup();
        Unsupported::Architecture { name: name.to_owned(), supported: names.join(", ") }
    })
}

/// Returns the row with or without experts of an architecture with one for each, or `arch` if it has only one.
pub fn with_experts(arch: &'static ArchSpec, has_experts: bool) -> &'static ArchSpec {
    let same =
        |other: &&ArchSpec| other.architecture == arch.architecture && other.experts.is_some() == has_experts;
    ARCHITECTURES.iter().find(same).unwrap_or(arch)
}

/// Returns the row of a GGUF architecture with or without experts, and with windows in some layers if there is one and
/// the file has a window. Errors: as [`find`]; there is no such row.
pub fn find_gguf(name: &str, n_experts: usize, has_window: bool) -> Result<&'static ArchSpec, Unsupported> {
    let first = find(name, |arch| arch.gguf_architecture)?;
    let rows = ARCHITECTURES.iter().filter(|arch| arch.gguf_architecture == first.gguf_architecture);
    let mut rows = rows.filter(|arch| arch.experts.is_some() == (n_experts > 0));
    let windowed = |arch: &&ArchSpec| has_window && matches!(arch.window, WindowRule::AllButEvery(_));
    rows.clone().find(windowed).or(rows.next()).ok_or_else(|| Unsupported::Feature {
        what: "a mixture of experts",
        value: format!("{name}.expert_count = {n_experts}"),
        supported: if first.experts.is_some() { "models with experts" } else { "dense models" },
    })
}
