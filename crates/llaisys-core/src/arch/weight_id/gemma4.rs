//! The weights that only Gemma 4 has, and its names.

use super::{
    ATTENTION, ExpertPart, FOLDER_NAMES, FOUR_NORMS, GGUF_ATTENTION, GGUF_NAMES, GGUF_NORMS, LayerWeight,
    NameTable, Names, QK_NORMS,
};

/// One weight of a layer that only Gemma 4 has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Gemma4Weight {
    /// Factor of the layer's output, `[1]`.
    Scalar,
    /// Gate of the layer's input, `[d_input, d_model]`.
    InputGate,
    /// Projection of the gated input, `[d_model, d_input]`.
    InputProjection,
    /// Norm of the projected input, `[d_model]`.
    InputNorm,
    /// Norm of the output of the dense feed-forward block next to experts, `[d_model]`.
    DensePostNorm,
    /// Norm before the experts, `[d_model]`.
    ExpertsNorm,
    /// Norm of the output of the experts, `[d_model]`.
    ExpertsPostNorm,
    /// Factors of the router's normalized inputs, `[d_model]`.
    RouterScale,
    /// Factor of the weight of each expert, `[n_experts]`.
    ExpertScale,
}

/// One weight of the inputs of all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerInputWeight {
    /// Embeddings of all layers, `[vocab_size, n_layers * d_input]`.
    Embed,
    /// Projection of the token's embedding to the inputs of all layers, `[n_layers * d_input, d_model]`.
    Projection,
    /// Norm of each layer's part of the projection, `[d_input]`.
    Norm,
}

impl LayerInputWeight {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Embed, Self::Projection, Self::Norm];
}

const FEED_FORWARD: Names = &[
    (LayerWeight::Gate, "mlp.gate_proj.weight"),
    (LayerWeight::Up, "mlp.up_proj.weight"),
    (LayerWeight::Down, "mlp.down_proj.weight"),
    (LayerWeight::Router, "router.proj.weight"),
    (LayerWeight::ExpertsGateUp, "experts.gate_up_proj"),
    (LayerWeight::Experts(ExpertPart::Down), "experts.down_proj"),
];

/// Names in a folder of Gemma 4, dense or with experts.
pub const GEMMA4_FOLDER_NAMES: NameTable = NameTable {
    layer_inputs: &[
        (LayerInputWeight::Embed, "model.embed_tokens_per_layer.weight"),
        (LayerInputWeight::Projection, "model.per_layer_model_projection.weight"),
        (LayerInputWeight::Norm, "model.per_layer_projection_norm.weight"),
    ],
    in_layer: &[
        FOUR_NORMS,
        ATTENTION,
        QK_NORMS,
        FEED_FORWARD,
        &[
            (LayerWeight::Gemma4(Gemma4Weight::Scalar), "layer_scalar"),
            (LayerWeight::Gemma4(Gemma4Weight::InputGate), "per_layer_input_gate.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::InputProjection), "per_layer_projection.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::InputNorm), "post_per_layer_input_norm.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::DensePostNorm), "post_feedforward_layernorm_1.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::ExpertsNorm), "pre_feedforward_layernorm_2.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::ExpertsPostNorm), "post_feedforward_layernorm_2.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::RouterScale), "router.scale"),
            (LayerWeight::Gemma4(Gemma4Weight::ExpertScale), "router.per_expert_scale"),
        ],
    ],
    ..FOLDER_NAMES
};

const GGUF_FEED_FORWARD: Names = &[
    (LayerWeight::Gate, "ffn_gate.weight"),
    (LayerWeight::Up, "ffn_up.weight"),
    (LayerWeight::Down, "ffn_down.weight"),
    (LayerWeight::Router, "ffn_gate_inp.weight"),
    (LayerWeight::ExpertsGateUp, "ffn_gate_up_exps.weight"),
    (LayerWeight::Experts(ExpertPart::Down), "ffn_down_exps.weight"),
];

/// Names in a GGUF file of Gemma 4, dense or with experts (llama.cpp's `gguf-py/gguf/constants.py`).
pub const GEMMA4_GGUF_NAMES: NameTable = NameTable {
    layer_inputs: &[
        (LayerInputWeight::Embed, "per_layer_token_embd.weight"),
        (LayerInputWeight::Projection, "per_layer_model_proj.weight"),
        (LayerInputWeight::Norm, "per_layer_proj_norm.weight"),
    ],
    in_layer: &[
        GGUF_NORMS,
        GGUF_ATTENTION,
        GGUF_FEED_FORWARD,
        &[
            (LayerWeight::Gemma4(Gemma4Weight::Scalar), "layer_output_scale.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::InputGate), "inp_gate.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::InputProjection), "proj.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::InputNorm), "post_norm.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::DensePostNorm), "post_ffw_norm_1.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::ExpertsNorm), "pre_ffw_norm_2.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::ExpertsPostNorm), "post_ffw_norm_2.weight"),
            (LayerWeight::Gemma4(Gemma4Weight::RouterScale), "ffn_gate_inp.scale"),
            (LayerWeight::Gemma4(Gemma4Weight::ExpertScale), "ffn_down_exps.scale"),
        ],
    ],
    ..GGUF_NAMES
};
