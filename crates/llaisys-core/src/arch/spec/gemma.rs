//! The rows of Gemma, the text models.

use super::{Activation, ArchSpec, ExpertKeys, LLAMA, QkNorm, QueryScalar, RopeRows, SoftCap, WindowRule};
use crate::arch::bias::Biases;
use crate::arch::rope::{LocalRope, RopeRules};
use crate::arch::weight_id::{FOUR_NORM_FOLDER_NAMES, GEMMA4_FOLDER_NAMES, GEMMA4_GGUF_NAMES};

/// Gemma 2.
pub const GEMMA2: ArchSpec = ArchSpec {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    gguf_architecture: "gemma2",
    biases: Biases::ATTENTION,
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
pub const GEMMA3: ArchSpec = ArchSpec {
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    gguf_architecture: "gemma3",
    qk_norm: QkNorm::Head,
    query_scalar: Some(QueryScalar { default: 256, layers_by_width: 62 }),
    attn_soft_cap: SoftCap::Unsupported,
    logit_soft_cap: SoftCap::Stated(None),
    window: WindowRule::AllButEvery(6),
    rope: RopeRules { theta_default: 1e6, local: LocalRope::Base(1e4), ..RopeRules::PLAIN },
    ..GEMMA2
};

/// Gemma 4, dense.
pub const GEMMA4: ArchSpec = ArchSpec {
    architecture: "Gemma4ForCausalLM",
    model_type: "gemma4_text",
    gguf_architecture: "gemma4",
    biases: Biases::NONE,
    qk_norm: QkNorm::Head,
    post_norms: true,
    activation: Activation::GeluTanh,
    d_head_default: Some(256),
    tied_default: true,
    embed_sqrt: true,
    logit_soft_cap: SoftCap::Stated(None),
    window: WindowRule::AllButEvery(6),
    rope: RopeRules { theta_default: 1e6, local: LocalRope::Base(1e4), ..RopeRules::PLAIN },
    gemma4: true,
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &GEMMA4_FOLDER_NAMES,
    gguf_names: &GEMMA4_GGUF_NAMES,
    // llama.cpp's end tokens, of which the last hands over to a tool.
    gguf_end_tokens: &["<eos>", "<turn|>", "<|tool_response>"],
    ..LLAMA
};

/// Gemma 4 with a mixture of experts next to the dense block of each layer.
pub const GEMMA4_MOE: ArchSpec =
    ArchSpec { experts: Some(ExpertKeys { n_used: "top_k_experts", ..ExpertKeys::SOFTMAX }), ..GEMMA4 };
