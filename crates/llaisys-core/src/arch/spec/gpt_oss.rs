//! The row of gpt-oss: attention sinks, windows in every other layer, and experts with biases and a clamped gate.

use super::{Activation, ArchSpec, ExpertKeys, LLAMA, RopeRows, WindowRule};
use crate::arch::bias::Biases;
use crate::arch::rope::RopeRules;
use crate::arch::weight_id::{GPT_OSS_FOLDER_NAMES, GPT_OSS_GGUF_NAMES};

/// gpt-oss.
pub const GPT_OSS: ArchSpec = ArchSpec {
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    gguf_architecture: "gpt-oss",
    biases: Biases::GPT_OSS,
    activation: Activation::ClampedSilu,
    d_head_default: Some(64),
    rms_eps_default: 1e-5,
    attn_sinks: true,
    window: WindowRule::AllButEvery(2),
    rope: RopeRules { theta_default: 150_000.0, gguf_yarn_truncates: false, ..RopeRules::PLAIN },
    experts: Some(ExpertKeys {
        n: "num_local_experts",
        d_ff: "intermediate_size",
        projection_biases: true,
        ..ExpertKeys::SOFTMAX
    }),
    gguf_rope_rows: RopeRows::HalfSplit,
    // `<|end|>` ends a message; keys of some files name it.
    gguf_end_tokens: &["<|return|>", "<|call|>", "<|endoftext|>"],
    folder_names: &GPT_OSS_FOLDER_NAMES,
    gguf_names: &GPT_OSS_GGUF_NAMES,
    ..LLAMA
};
