//! The rows of LFM2: gated short convolutions, and attention in some layers.

use super::{ArchSpec, ExpertKeys, LLAMA, QkNorm, RopeRows};
use crate::arch::bias::Biases;
use crate::arch::recurrent::RecurrentKind;
use crate::arch::rope::RopeRules;
use crate::arch::weight_id::{LFM2_FOLDER_NAMES, LFM2_GGUF_NAMES};

/// LFM2 and LFM2.5, dense.
pub const LFM2: ArchSpec = ArchSpec {
    architecture: "Lfm2ForCausalLM",
    model_type: "lfm2",
    gguf_architecture: "lfm2",
    biases: Biases::NONE,
    qk_norm: QkNorm::Head,
    rms_eps_key: "norm_eps",
    rms_eps_default: 1e-5,
    tied_keys: &["tie_embedding", "tie_word_embeddings"],
    tied_default: true,
    rope: RopeRules { theta_default: 1e6, ..RopeRules::PLAIN },
    adjusts_d_ff: true,
    recurrent: Some(RecurrentKind::ShortConv),
    gguf_rope_rows: RopeRows::HalfSplit,
    folder_names: &LFM2_FOLDER_NAMES,
    gguf_names: &LFM2_GGUF_NAMES,
    ..LLAMA
};

/// LFM2 and LFM2.5 with a mixture of experts in all layers except the first ones.
pub const LFM2_MOE: ArchSpec = ArchSpec {
    architecture: "Lfm2MoeForCausalLM",
    model_type: "lfm2_moe",
    gguf_architecture: "lfm2moe",
    adjusts_d_ff: false,
    experts: Some(ExpertKeys {
        normalize: Some("norm_topk_prob"),
        normalize_default: true,
        sigmoid: true,
        ..ExpertKeys::SOFTMAX
    }),
    ..LFM2
};
