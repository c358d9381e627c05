//! The names of gpt-oss.

use super::{
    ATTENTION, ExpertPart, FOLDER_NAMES, GGUF_ATTENTION, GGUF_FEED_FORWARD, GGUF_NAMES, LayerWeight,
    NameTable, TWO_NORMS,
};

/// Names in a folder of gpt-oss: all experts of a layer are in two tensors. In MXFP4 their names end in `_blocks` and
/// `_scales`.
pub const GPT_OSS_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        ATTENTION,
        &[
            (LayerWeight::Sinks, "self_attn.sinks"),
            (LayerWeight::Router, "mlp.router.weight"),
            (LayerWeight::RouterProjectionBias, "mlp.router.bias"),
            (LayerWeight::ExpertsGateUp, "mlp.experts.gate_up_proj"),
            (LayerWeight::ExpertsGateUpBias, "mlp.experts.gate_up_proj_bias"),
            (LayerWeight::Experts(ExpertPart::Down), "mlp.experts.down_proj"),
            (LayerWeight::ExpertsBias(ExpertPart::Down), "mlp.experts.down_proj_bias"),
        ],
    ],
    interleaved_experts: true,
    ..FOLDER_NAMES
};

/// Names in a GGUF file of gpt-oss: the norm before the feed-forward block has the name of one after attention.
pub const GPT_OSS_GGUF_NAMES: NameTable = NameTable {
    in_layer: &[
        &[
            (LayerWeight::AttnNorm, "attn_norm.weight"),
            (LayerWeight::FfnNorm, "post_attention_norm.weight"),
            (LayerWeight::Sinks, "attn_sinks.weight"),
            (LayerWeight::RouterProjectionBias, "ffn_gate_inp.bias"),
            (LayerWeight::ExpertsBias(ExpertPart::Gate), "ffn_gate_exps.bias"),
            (LayerWeight::ExpertsBias(ExpertPart::Up), "ffn_up_exps.bias"),
            (LayerWeight::ExpertsBias(ExpertPart::Down), "ffn_down_exps.bias"),
        ],
        GGUF_ATTENTION,
        GGUF_FEED_FORWARD,
    ],
    ..GGUF_NAMES
};
