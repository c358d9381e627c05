//! The rows of Qwen, attention models and hybrids.

use super::{ArchSpec, ExpertKeys, LLAMA, QkNorm, RopeRows, WindowRule};
use crate::arch::bias::Biases;
use crate::arch::recurrent::RecurrentKind;
use crate::arch::rope::RopeRules;
use crate::arch::weight_id::{
    QWEN3_5_FOLDER_NAMES, QWEN3_5_GGUF_NAMES, QWEN3_5_MOE_FOLDER_NAMES, QWEN3_NEXT_FOLDER_NAMES,
    QWEN3_NEXT_GGUF_NAMES,
};
use crate::ops::ValueOrder;

/// Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen.
pub const QWEN2: ArchSpec = ArchSpec {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    gguf_architecture: "qwen2",
    biases: Biases::QKV,
    window: WindowRule::SwitchedFromLayer,
    gguf_rope_rows: RopeRows::HalfSplit,
    ..LLAMA
};

/// Qwen3, dense.
pub const QWEN3: ArchSpec = ArchSpec {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    gguf_architecture: "qwen3",
    biases: Biases::ATTENTION,
    qk_norm: QkNorm::Head,
    d_head_default: Some(128),
    window: WindowRule::SwitchedFromLayer,
    gguf_rope_rows: RopeRows::HalfSplit,
    ..LLAMA
};

/// Qwen3 with a mixture of experts in every layer.
pub const QWEN3_MOE: ArchSpec = ArchSpec {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    gguf_architecture: "qwen3moe",
    window: WindowRule::Switched,
    experts: Some(ExpertKeys { normalize: Some("norm_topk_prob"), ..ExpertKeys::SOFTMAX }),
    ..QWEN3
};

/// Qwen3.5 and 3.6, dense, the text model.
pub const QWEN3_5: ArchSpec = ArchSpec {
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    gguf_architecture: "qwen35",
    biases: Biases::NONE,
    folder_norm_offset: 1.0,
    d_head_default: Some(256),
    window: WindowRule::Unsupported,
    rope: RopeRules { partial_default: Some(0.25), ..RopeRules::PLAIN },
    recurrent: Some(RecurrentKind::DeltaNet),
    folder_names: &QWEN3_5_FOLDER_NAMES,
    gguf_names: &QWEN3_5_GGUF_NAMES,
    gguf_value_order: ValueOrder::Alternating,
    ..QWEN3
};

/// Qwen3.5 and 3.6 with a mixture of experts in every layer, the text model.
pub const QWEN3_5_MOE: ArchSpec = ArchSpec {
    architecture: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    gguf_architecture: "qwen35moe",
    experts: Some(ExpertKeys::SOFTMAX),
    shared_expert: true,
    folder_names: &QWEN3_5_MOE_FOLDER_NAMES,
    ..QWEN3_5
};

/// Qwen3-Next.
pub const QWEN3_NEXT: ArchSpec = ArchSpec {
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    gguf_architecture: "qwen3next",
    experts: QWEN3_MOE.experts,
    folder_names: &QWEN3_NEXT_FOLDER_NAMES,
    gguf_names: &QWEN3_NEXT_GGUF_NAMES,
    gguf_value_order: ValueOrder::Grouped,
    ..QWEN3_5_MOE
};
