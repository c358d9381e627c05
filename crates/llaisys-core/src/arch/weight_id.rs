//! Ids of the weights of a model, and their names in each container.

mod gemma4;
mod gpt_oss;
mod hybrid;

pub use gemma4::{GEMMA4_FOLDER_NAMES, GEMMA4_GGUF_NAMES, Gemma4Weight, LayerInputWeight};
pub use gpt_oss::{GPT_OSS_FOLDER_NAMES, GPT_OSS_GGUF_NAMES};
pub use hybrid::{
    LFM2_FOLDER_NAMES, LFM2_GGUF_NAMES, QWEN3_5_FOLDER_NAMES, QWEN3_5_GGUF_NAMES, QWEN3_5_MOE_FOLDER_NAMES,
    QWEN3_NEXT_FOLDER_NAMES, QWEN3_NEXT_GGUF_NAMES,
};

/// One weight of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WeightId {
    /// Token embeddings, `[vocab_size, d_model]`.
    Embed,
    /// The last norm, `[d_model]`.
    OutputNorm,
    /// The head, `[vocab_size, d_model]`; absent where it is tied to the embeddings.
    LmHead,
    /// A weight of the inputs of all layers.
    LayerInputs(LayerInputWeight),
    /// A weight of layer `.0`.
    Layer(usize, LayerWeight),
}

/// One weight of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerWeight {
    /// Norm before attention, `[d_model]`.
    AttnNorm,
    /// Norm of the output of attention, `[d_model]`.
    AttnPostNorm,
    /// Norm before the feed-forward block, `[d_model]`.
    FfnNorm,
    /// Norm of the output of the feed-forward block, `[d_model]`.
    FfnPostNorm,
    /// Query, key and value projections stacked by rows, where a container fuses them.
    Qkv,
    /// Query projection, `[n_heads * d_head, d_model]`.
    Q,
    /// Key projection, `[n_kv_heads * d_head, d_model]`.
    K,
    /// Value projection, `[n_kv_heads * d_head, d_model]`.
    V,
    /// `[n_heads * d_head]`, with `qkv_bias`.
    QBias,
    /// `[n_kv_heads * d_head]`, with `qkv_bias`.
    KBias,
    /// `[n_kv_heads * d_head]`, with `qkv_bias`.
    VBias,
    /// The rows of each head's query, then those of its gate, where a container fuses them.
    QAndGate,
    /// Gate of the output of attention, `[n_heads * d_head, d_model]`.
    AttnGate,
    /// Norm of each query head, `[d_head]`, or of all, `[n_heads * d_head]`, with `qk_norm`.
    QNorm,
    /// As `QNorm`, of the keys.
    KNorm,
    /// Sink of each head, `[n_heads]`.
    Sinks,
    /// Output projection, `[d_model, n_heads * d_head]`.
    O,
    /// `[d_model]`, with `o_bias`.
    OBias,
    /// Gate and up projections stacked by rows, where a container fuses them.
    GateUp,
    /// Gate projection, `[d_ff, d_model]`.
    Gate,
    /// Up projection, `[d_ff, d_model]`.
    Up,
    /// Down projection, `[d_model, d_ff]`.
    Down,
    /// `[d_ff]`, with `mlp_bias`.
    GateBias,
    /// `[d_ff]`, with `mlp_bias`.
    UpBias,
    /// `[d_model]`, with `mlp_bias`.
    DownBias,
    /// The router, which chooses the experts of a token, `[n_experts, d_model]`.
    Router,
    /// Added to the scores of experts before some are chosen, `[n_experts]`.
    RouterBias,
    /// Bias of the router's projection, `[n_experts]`.
    RouterProjectionBias,
    /// A matrix of one expert, shaped as in a dense layer.
    Expert(usize, ExpertPart),
    /// The matrices of all experts, `[n_experts, ..]`, where a container stacks them.
    Experts(ExpertPart),
    /// Gate over up of each expert, `[n_experts, 2 * d_ff, d_model]`, where a container stacks and fuses them.
    ExpertsGateUp,
    /// The biases of a matrix of all experts, `[n_experts, ..]`.
    ExpertsBias(ExpertPart),
    /// The biases of `ExpertsGateUp`, `[n_experts, 2 * d_ff]`.
    ExpertsGateUpBias,
    /// A matrix of the expert that all tokens use.
    Shared(ExpertPart),
    /// Weight of the shared expert in a row before the sigmoid, `[1, d_model]`.
    SharedScale,
    /// A weight of a Gated DeltaNet layer.
    Delta(DeltaWeight),
    /// A weight of a gated short convolution.
    ShortConv(ShortConvWeight),
    /// A weight that only Gemma 4 has.
    Gemma4(Gemma4Weight),
}

/// One weight of a gated short convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ShortConvWeight {
    /// The projections to both gates and to the input stacked by rows, as containers have them.
    In,
    /// Projection to the gate of the convolution's input, `[d_model, d_model]`.
    InputGate,
    /// Projection to the gate of the convolution's output, `[d_model, d_model]`.
    OutputGate,
    /// Projection to the convolution's input before its gate, `[d_model, d_model]`.
    Input,
    /// The convolution, `[d_model, 1, n_taps]`, the newest tap last.
    Conv,
    /// Output projection, `[d_model, d_model]`.
    Out,
}

/// One weight of a Gated DeltaNet layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeltaWeight {
    /// Query, key and value projections stacked by rows, where a container fuses them.
    Qkv,
    /// Query, key, value and output gate projections by key head, where a container fuses them.
    Qkvz,
    /// Projections to write strengths and decays by key head, where a container fuses them.
    Ba,
    /// Query projection, `[n_keys * d_key, d_model]`.
    Q,
    /// Key projection, `[n_keys * d_key, d_model]`.
    K,
    /// Value projection, `[n_values * d_value, d_model]`.
    V,
    /// Projection to the gate of the output, `[n_values * d_value, d_model]`.
    Z,
    /// Projection to the write strength of each value head, `[n_values, d_model]`.
    B,
    /// Projection to the decay of each value head, `[n_values, d_model]`.
    A,
    /// Short convolution of queries, keys and values, `[channels, 1, n_taps]`, the newest tap last.
    Conv,
    /// Logarithm of each value head's decay rate, `[n_values]`.
    ALog,
    /// Each value head's decay rate times -1, `[n_values]`, where a container has it instead of `ALog`.
    MinusRate,
    /// Added to `A`, `[n_values]`.
    DtBias,
    /// Norm of each value head's output, `[d_value]`.
    Norm,
    /// Output projection, `[d_model, n_values * d_value]`.
    Out,
}

impl LayerWeight {
    /// The biases of the q, k and v projections.
    pub(crate) const QKV_BIASES: &[Self] = &[Self::QBias, Self::KBias, Self::VBias];
    /// The biases of the feed-forward block.
    pub(crate) const MLP_BIASES: &[Self] = &[Self::GateBias, Self::UpBias, Self::DownBias];

    /// True for the biases of all experts, which are vectors although their tensor has two dimensions.
    pub fn is_stacked_bias(self) -> bool {
        matches!(self, Self::ExpertsBias(_) | Self::ExpertsGateUpBias)
    }

    /// True for the weights of norms from which a folder subtracts the architecture's offset.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::AttnNorm
                | Self::AttnPostNorm
                | Self::FfnNorm
                | Self::FfnPostNorm
                | Self::QNorm
                | Self::KNorm
        )
    }
}

/// One of the three matrices of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertPart {
    /// `[d_ff, d_model]`
    Gate,
    /// `[d_ff, d_model]`
    Up,
    /// `[d_model, d_ff]`
    Down,
}

/// Weights of a layer with the endings of their names. An expert has the number 0 here; `{}` in its ending stands for
/// the number.
pub type Names = &'static [(LayerWeight, &'static str)];

/// The names of tensors in a container. A weight without a name is not stored by itself: the parts of fused projections
/// and the single matrices of stacked experts have no names.
#[derive(Debug, PartialEq, Eq)]
pub struct NameTable {
    /// Name of [`WeightId::Embed`].
    pub embed: &'static str,
    /// Name of the tensor `[d_rope / 2]` by which rope frequencies are divided, in GGUF files. It is part of the
    /// configuration, not a weight.
    pub rope_factors: &'static str,
    /// As `rope_factors`, of contexts that are longer than the original one.
    pub rope_factors_long: &'static str,
    /// Name of [`WeightId::OutputNorm`].
    pub output_norm: &'static str,
    /// Name of [`WeightId::LmHead`].
    pub lm_head: &'static str,
    /// Names of the weights of the inputs of all layers.
    pub layer_inputs: &'static [(LayerInputWeight, &'static str)],
    /// Prefix before the layer's number and a dot.
    pub layer: &'static str,
    /// Endings after them, for each weight.
    pub in_layer: &'static [Names],
    /// Endings of the names of tensors that are ignored, because the forward pass does not need them.
    pub ignored_endings: &'static [&'static str],
    /// Prefixes of tensors that are skipped: heads that predict several tokens.
    pub skipped: &'static [&'static str],
    /// Rows of gate and up alternate in stacked experts, and stacked experts in floats are stored transposed.
    pub interleaved_experts: bool,
}

const TWO_NORMS: Names = &[
    (LayerWeight::AttnNorm, "input_layernorm.weight"),
    (LayerWeight::FfnNorm, "post_attention_layernorm.weight"),
];
/// An architecture has the norms before, those after, or both.
const FOUR_NORMS: Names = &[
    (LayerWeight::AttnNorm, "input_layernorm.weight"),
    (LayerWeight::AttnPostNorm, "post_attention_layernorm.weight"),
    (LayerWeight::FfnNorm, "pre_feedforward_layernorm.weight"),
    (LayerWeight::FfnPostNorm, "post_feedforward_layernorm.weight"),
];
const ATTENTION: Names = &[
    (LayerWeight::Q, "self_attn.q_proj.weight"),
    (LayerWeight::K, "self_attn.k_proj.weight"),
    (LayerWeight::V, "self_attn.v_proj.weight"),
    (LayerWeight::QBias, "self_attn.q_proj.bias"),
    (LayerWeight::KBias, "self_attn.k_proj.bias"),
    (LayerWeight::VBias, "self_attn.v_proj.bias"),
    (LayerWeight::O, "self_attn.o_proj.weight"),
    (LayerWeight::OBias, "self_attn.o_proj.bias"),
];
const QK_NORMS: Names =
    &[(LayerWeight::QNorm, "self_attn.q_norm.weight"), (LayerWeight::KNorm, "self_attn.k_norm.weight")];
const FEED_FORWARD: Names = &[
    (LayerWeight::Gate, "mlp.gate_proj.weight"),
    (LayerWeight::Up, "mlp.up_proj.weight"),
    (LayerWeight::Down, "mlp.down_proj.weight"),
    (LayerWeight::GateBias, "mlp.gate_proj.bias"),
    (LayerWeight::UpBias, "mlp.up_proj.bias"),
    (LayerWeight::DownBias, "mlp.down_proj.bias"),
    (LayerWeight::Router, "mlp.gate.weight"),
    (LayerWeight::Expert(0, ExpertPart::Gate), "mlp.experts.{}.gate_proj.weight"),
    (LayerWeight::Expert(0, ExpertPart::Up), "mlp.experts.{}.up_proj.weight"),
    (LayerWeight::Expert(0, ExpertPart::Down), "mlp.experts.{}.down_proj.weight"),
];

/// Names in a Hugging Face folder (Llama and similar architectures in transformers).
pub const FOLDER_NAMES: NameTable = NameTable {
    embed: "model.embed_tokens.weight",
    rope_factors: "",
    rope_factors_long: "",
    output_norm: "model.norm.weight",
    lm_head: "lm_head.weight",
    layer_inputs: &[],
    layer: "model.layers.",
    in_layer: &[TWO_NORMS, ATTENTION, QK_NORMS, FEED_FORWARD],
    // Old checkpoints saved the rope frequencies, which follow from the configuration.
    ignored_endings: &[".rotary_emb.inv_freq"],
    skipped: &[],
    interleaved_experts: false,
};

/// Names in a folder of an architecture with norms after each block (Gemma, OLMo 2).
pub const FOUR_NORM_FOLDER_NAMES: NameTable =
    NameTable { in_layer: &[FOUR_NORMS, ATTENTION, QK_NORMS, FEED_FORWARD], ..FOLDER_NAMES };

/// Names in a folder of Hunyuan.
pub const HUNYUAN_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        ATTENTION,
        &[
            (LayerWeight::QNorm, "self_attn.query_layernorm.weight"),
            (LayerWeight::KNorm, "self_attn.key_layernorm.weight"),
        ],
        FEED_FORWARD,
    ],
    ..FOLDER_NAMES
};

/// Names in a folder of a dense Granite 4.0: the experts that it does not have would be next to a shared block.
pub const GRANITE_HYBRID_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        ATTENTION,
        &[
            (LayerWeight::GateUp, "shared_mlp.input_linear.weight"),
            (LayerWeight::Down, "shared_mlp.output_linear.weight"),
        ],
    ],
    ..FOLDER_NAMES
};

/// Names in a folder of GLM-4. The norm after attention is not `post_attention_layernorm`.
pub const GLM4_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        &[
            (LayerWeight::AttnNorm, "input_layernorm.weight"),
            (LayerWeight::AttnPostNorm, "post_self_attn_layernorm.weight"),
            (LayerWeight::FfnNorm, "post_attention_layernorm.weight"),
            (LayerWeight::FfnPostNorm, "post_mlp_layernorm.weight"),
        ],
        ATTENTION,
        &[(LayerWeight::GateUp, "mlp.gate_up_proj.weight"), (LayerWeight::Down, "mlp.down_proj.weight")],
    ],
    ..FOLDER_NAMES
};

/// Names in a folder of Phi-3.
pub const FUSED_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        &[
            (LayerWeight::Qkv, "self_attn.qkv_proj.weight"),
            (LayerWeight::O, "self_attn.o_proj.weight"),
            (LayerWeight::GateUp, "mlp.gate_up_proj.weight"),
            (LayerWeight::Down, "mlp.down_proj.weight"),
        ],
    ],
    ..FOLDER_NAMES
};

/// Names in a folder of Mixtral.
pub const MIXTRAL_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        ATTENTION,
        &[
            (LayerWeight::Router, "block_sparse_moe.gate.weight"),
            (LayerWeight::Expert(0, ExpertPart::Gate), "block_sparse_moe.experts.{}.w1.weight"),
            (LayerWeight::Expert(0, ExpertPart::Up), "block_sparse_moe.experts.{}.w3.weight"),
            (LayerWeight::Expert(0, ExpertPart::Down), "block_sparse_moe.experts.{}.w2.weight"),
        ],
    ],
    ..FOLDER_NAMES
};

const GGUF_NORMS: Names = &[
    (LayerWeight::AttnNorm, "attn_norm.weight"),
    (LayerWeight::AttnPostNorm, "post_attention_norm.weight"),
    (LayerWeight::FfnNorm, "ffn_norm.weight"),
    (LayerWeight::FfnPostNorm, "post_ffw_norm.weight"),
];

const GGUF_ATTENTION: Names = &[
    (LayerWeight::Q, "attn_q.weight"),
    (LayerWeight::K, "attn_k.weight"),
    (LayerWeight::V, "attn_v.weight"),
    (LayerWeight::QBias, "attn_q.bias"),
    (LayerWeight::KBias, "attn_k.bias"),
    (LayerWeight::VBias, "attn_v.bias"),
    (LayerWeight::QNorm, "attn_q_norm.weight"),
    (LayerWeight::KNorm, "attn_k_norm.weight"),
    (LayerWeight::O, "attn_output.weight"),
    (LayerWeight::OBias, "attn_output.bias"),
];
const GGUF_FEED_FORWARD: Names = &[
    (LayerWeight::Gate, "ffn_gate.weight"),
    (LayerWeight::Up, "ffn_up.weight"),
    (LayerWeight::Down, "ffn_down.weight"),
    (LayerWeight::GateBias, "ffn_gate.bias"),
    (LayerWeight::UpBias, "ffn_up.bias"),
    (LayerWeight::DownBias, "ffn_down.bias"),
    (LayerWeight::Router, "ffn_gate_inp.weight"),
    (LayerWeight::Experts(ExpertPart::Gate), "ffn_gate_exps.weight"),
    (LayerWeight::Experts(ExpertPart::Up), "ffn_up_exps.weight"),
    (LayerWeight::Experts(ExpertPart::Down), "ffn_down_exps.weight"),
];

/// Names in a GGUF file (the GGUF specification's standardized tensor names).
pub const GGUF_NAMES: NameTable = NameTable {
    embed: "token_embd.weight",
    rope_factors: "rope_freqs.weight",
    rope_factors_long: "",
    output_norm: "output_norm.weight",
    lm_head: "output.weight",
    layer_inputs: &[],
    layer: "blk.",
    in_layer: &[GGUF_NORMS, GGUF_ATTENTION, GGUF_FEED_FORWARD],
    ignored_endings: &[],
    skipped: &[],
    interleaved_experts: false,
};

/// Names in a GGUF file of Seed-OSS: the norm before the feed-forward block has the name of one after attention.
pub const SEED_OSS_GGUF_NAMES: NameTable = NameTable {
    in_layer: &[
        &[(LayerWeight::AttnNorm, "attn_norm.weight"), (LayerWeight::FfnNorm, "post_attention_norm.weight")],
        GGUF_ATTENTION,
        GGUF_FEED_FORWARD,
    ],
    ..GGUF_NAMES
};

/// Names in a GGUF file of Phi-3: the fused gate and up projections have the name of up.
pub const FUSED_GGUF_NAMES: NameTable = NameTable {
    rope_factors: "rope_factors_short.weight",
    rope_factors_long: "rope_factors_long.weight",
    in_layer: &[
        GGUF_NORMS,
        &[
            (LayerWeight::Qkv, "attn_qkv.weight"),
            (LayerWeight::O, "attn_output.weight"),
            (LayerWeight::GateUp, "ffn_up.weight"),
            (LayerWeight::Down, "ffn_down.weight"),
        ],
    ],
    ..GGUF_NAMES
};

/// Names in a GGUF file of GLM-4: the fused gate and up projections have the name of up.
pub const GLM4_GGUF_NAMES: NameTable = NameTable {
    in_layer: &[
        GGUF_NORMS,
        GGUF_ATTENTION,
        &[(LayerWeight::GateUp, "ffn_up.weight"), (LayerWeight::Down, "ffn_down.weight")],
    ],
    ..GGUF_NAMES
};

impl NameTable {
    /// The weights of a layer that this container can store, each once; experts have the number 0.
    pub fn parts(&self) -> impl Iterator<Item = LayerWeight> {
        self.in_layer.iter().flat_map(|names| names.iter().map(|&(part, _)| part))
    }

    /// The name of a weight; None if this container does not store it by itself.
    pub fn name(&self, id: WeightId) -> Option<String> {
        match id {
            WeightId::Embed => Some(self.embed.to_owned()),
            WeightId::OutputNorm => Some(self.output_norm.to_owned()),
            WeightId::LmHead => Some(self.lm_head.to_owned()),
            WeightId::LayerInputs(part) => {
                let (_, name) = self.layer_inputs.iter().find(|(named, _)| *named == part)?;
                Some((*name).to_owned())
            }
            WeightId::Layer(layer, part) => {
                let (named, expert) = match part {
                    LayerWeight::Expert(expert, matrix) => (LayerWeight::Expert(0, matrix), expert),
                    other => (other, 0),
                };
                let mut names = self.in_layer.iter().flat_map(|names| names.iter());
                let (_, ending) = names.find(|(part, _)| *part == named)?;
                Some(format!("{}{layer}.{}", self.layer, ending.replace("{}", &expert.to_string())))
            }
        }
    }

    /// True if the tensor called `name` is ignored.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored_endings.iter().any(|ending| name.ends_with(ending))
    }
}
