//! Refuses models that the device's kernels cannot compute, by name and before a weight is read.

use crate::arch::config::ModelConfig;
use crate::arch::spec::QkNorm;
use crate::cuda::ops::add_rms_norm::MAX_WIDTH;
use crate::cuda::ops::attention::supports_head_width;
use crate::error::Unsupported;

/// Architectures with which the GPU's forward pass has not been verified.
const CPU_ONLY: [&str; 15] = [
    "SmolLM3ForCausalLM",
    "Olmo3ForCausalLM",
    "Ministral3ForCausalLM",
    "Glm4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "SeedOssForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
];

/// Checks that the kernels support the model. Errors: the first property that they do not support.
pub fn check(config: &ModelConfig) -> Result<(), Unsupported> {
    let refuse = |what, value: String, supported| {
        Err(Unsupported::Feature { what, value: format!("{value} on a GPU"), supported })
    };
    if let Some(architecture) = CPU_ONLY.into_iter().find(|&name| name == config.arch.architecture) {
        return refuse("the architecture", architecture.to_owned(), "the same model on the CPU");
    }
    if !supports_head_width(config.d_head) {
        return refuse("the head width", config.d_head.to_string(), "64, 80, 96, 128");
    }
    if let Some(experts) = config.experts {
        return refuse("a mixture of experts", experts.n.to_string(), "dense models");
    }
    if config.arch.qk_norm == QkNorm::RotatedHead {
        return refuse(
            "the norm of q and k",
            "after the rotation".to_owned(),
            "none, or before the rotation",
        );
    }
    for (what, has_bias) in [("o_proj", config.o_bias), ("the feed-forward block", config.mlp_bias)] {
        if has_bias {
            return refuse("a bias", format!("in {what}"), "biases of q, k and v");
        }
    }
    if config.arch.qk_norm == QkNorm::Projection {
        return refuse("the norm of q and k", "all heads together".to_owned(), "none, or each head's");
    }
    if !config.arch.pre_norms || config.arch.post_norms {
        let where_ = if config.arch.pre_norms { "before and after a part" } else { "after a part" };
        return refuse("a norm", where_.to_owned(), "before a part");
    }
    if config.local_rope.is_some() {
        return refuse("a rotation", "another one in layers with a window".to_owned(), "one for all layers");
    }
    if config.rotated.contains(&false) {
        return refuse("a rotation", "only of some layers".to_owned(), "one for all layers");
    }
    if config.d_rope != config.d_head {
        let value = format!("of {} of {} elements of a head", config.d_rope, config.d_head);
        return refuse("a rotation", value, "one of whole heads");
    }
    if config.query_scaling.is_some() {
        return refuse("the scaling of queries", "by position".to_owned(), "none");
    }
    let caps =
        [("the soft cap of scores", config.attn_soft_cap), ("the soft cap of logits", config.logit_soft_cap)];
    for (what, cap) in caps {
        if let Some(cap) = cap {
            return refuse(what, cap.to_string(), "none");
        }
    }
    let scales = [
        ("the scale of embeddings", config.embed_scale),
        ("the scale of the residual branches", config.residual_scale),
        ("the scale of logits", config.logit_scale),
    ];
    for (what, scale) in scales {
        if scale != 1.0 {
            return refuse(what, scale.to_string(), "1");
        }
    }
    for (what, width) in [("the model width", config.d_model), ("the feed-forward width", config.d_ff)] {
        if !width.is_multiple_of(8) {
            return refuse(what, width.to_string(), "a multiple of 8");
        }
    }
    if config.d_model > MAX_WIDTH {
        return refuse("the model width", config.d_model.to_string(), "up to 16384");
    }
    Ok(())
}
