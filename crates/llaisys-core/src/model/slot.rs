//! Slots: the places of tensors in a model, and how each container spells their names.

/// The place of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// Token embeddings, `[vocab_size, d_model]`.
    Embed,
    /// The last norm, `[d_model]`.
    OutputNorm,
    /// The head, `[vocab_size, d_model]`; absent where it is tied to the embeddings.
    LmHead,
    /// A tensor of layer `.0`.
    Layer(usize, LayerSlot),
}

/// The place of one tensor in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerSlot {
    /// Norm before attention, `[d_model]`.
    AttnNorm,
    /// Norm of what attention adds to the residual stream, `[d_model]`.
    AttnPostNorm,
    /// Norm before the feed-forward part, `[d_model]`.
    FfnNorm,
    /// Norm of what the feed-forward part adds to the residual stream, `[d_model]`.
    FfnPostNorm,
    /// Query, key and value projections one below the other, where a container stores them so.
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
    /// Norm of each query head, `[d_head]`, or of all, `[n_heads * d_head]`, with `qk_norm`.
    QNorm,
    /// As `QNorm`, of the keys.
    KNorm,
    /// Output projection, `[d_model, n_heads * d_head]`.
    O,
    /// Gate and up projections one below the other, where a container stores them so.
    GateUp,
    /// Gate projection, `[d_ff, d_model]`.
    Gate,
    /// Up projection, `[d_ff, d_model]`.
    Up,
    /// Down projection, `[d_model, d_ff]`.
    Down,
    /// What chooses the experts of a token, `[n_experts, d_model]`.
    Router,
    /// A matrix of one expert, in the shape of a dense layer's.
    Expert(usize, ExpertPart),
    /// A matrix of all experts, `[n_experts, ..]`, where a container stacks them.
    Experts(ExpertPart),
}

impl LayerSlot {
    /// True for the weights of norms.
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

/// Some places of a layer with the endings of their names. In the ending of an expert's place, whose number
/// here is 0, `{}` stands for the number.
pub type Names = &'static [(LayerSlot, &'static str)];

/// How a container spells the names of tensors. A place that it does not name is not stored as such: fused
/// projections have no names of their parts, stacked experts none of single ones.
#[derive(Debug, PartialEq, Eq)]
pub struct NameTable {
    /// Of [`Slot::Embed`].
    pub embed: &'static str,
    /// Of the tensor `[d_head / 2]` by which rope frequencies are divided, in GGUF files. It belongs to the
    /// configuration and is no slot.
    pub rope_factors: &'static str,
    /// Of [`Slot::OutputNorm`].
    pub output_norm: &'static str,
    /// Of [`Slot::LmHead`].
    pub lm_head: &'static str,
    /// What stands before the layer's number and a dot.
    pub layer: &'static str,
    /// What stands after them, for each place.
    pub in_layer: &'static [Names],
    /// Endings of names that carry nothing the forward pass needs, and are passed over.
    pub ignored_endings: &'static [&'static str],
}

const TWO_NORMS: Names = &[
    (LayerSlot::AttnNorm, "input_layernorm.weight"),
    (LayerSlot::FfnNorm, "post_attention_layernorm.weight"),
];
/// A family has the norms before, those after, or both.
const FOUR_NORMS: Names = &[
    (LayerSlot::AttnNorm, "input_layernorm.weight"),
    (LayerSlot::AttnPostNorm, "post_attention_layernorm.weight"),
    (LayerSlot::FfnNorm, "pre_feedforward_layernorm.weight"),
    (LayerSlot::FfnPostNorm, "post_feedforward_layernorm.weight"),
];
const ATTENTION: Names = &[
    (LayerSlot::Q, "self_attn.q_proj.weight"),
    (LayerSlot::K, "self_attn.k_proj.weight"),
    (LayerSlot::V, "self_attn.v_proj.weight"),
    (LayerSlot::QBias, "self_attn.q_proj.bias"),
    (LayerSlot::KBias, "self_attn.k_proj.bias"),
    (LayerSlot::VBias, "self_attn.v_proj.bias"),
    (LayerSlot::QNorm, "self_attn.q_norm.weight"),
    (LayerSlot::KNorm, "self_attn.k_norm.weight"),
    (LayerSlot::O, "self_attn.o_proj.weight"),
];
const FEED_FORWARD: Names = &[
    (LayerSlot::Gate, "mlp.gate_proj.weight"),
    (LayerSlot::Up, "mlp.up_proj.weight"),
    (LayerSlot::Down, "mlp.down_proj.weight"),
    (LayerSlot::Router, "mlp.gate.weight"),
    (LayerSlot::Expert(0, ExpertPart::Gate), "mlp.experts.{}.gate_proj.weight"),
    (LayerSlot::Expert(0, ExpertPart::Up), "mlp.experts.{}.up_proj.weight"),
    (LayerSlot::Expert(0, ExpertPart::Down), "mlp.experts.{}.down_proj.weight"),
];

/// Names in a Hugging Face folder (Llama and its kin in transformers).
pub const FOLDER_NAMES: NameTable = NameTable {
    embed: "model.embed_tokens.weight",
    rope_factors: "",
    output_norm: "model.norm.weight",
    lm_head: "lm_head.weight",
    layer: "model.layers.",
    in_layer: &[TWO_NORMS, ATTENTION, FEED_FORWARD],
    // Old checkpoints saved the rope frequencies, which follow from the configuration.
    ignored_endings: &[".rotary_emb.inv_freq"],
};

/// Names in a folder of a family that norms what it adds (Gemma, OLMo 2).
pub const FOUR_NORM_FOLDER_NAMES: NameTable =
    NameTable { in_layer: &[FOUR_NORMS, ATTENTION, FEED_FORWARD], ..FOLDER_NAMES };

/// Names in a folder of Phi-3.
pub const FUSED_FOLDER_NAMES: NameTable = NameTable {
    in_layer: &[
        TWO_NORMS,
        &[
            (LayerSlot::Qkv, "self_attn.qkv_proj.weight"),
            (LayerSlot::O, "self_attn.o_proj.weight"),
            (LayerSlot::GateUp, "mlp.gate_up_proj.weight"),
            (LayerSlot::Down, "mlp.down_proj.weight"),
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
            (LayerSlot::Router, "block_sparse_moe.gate.weight"),
            (LayerSlot::Expert(0, ExpertPart::Gate), "block_sparse_moe.experts.{}.w1.weight"),
            (LayerSlot::Expert(0, ExpertPart::Up), "block_sparse_moe.experts.{}.w3.weight"),
            (LayerSlot::Expert(0, ExpertPart::Down), "block_sparse_moe.experts.{}.w2.weight"),
        ],
    ],
    ..FOLDER_NAMES
};

const GGUF_NORMS: Names = &[
    (LayerSlot::AttnNorm, "attn_norm.weight"),
    (LayerSlot::AttnPostNorm, "post_attention_norm.weight"),
    (LayerSlot::FfnNorm, "ffn_norm.weight"),
    (LayerSlot::FfnPostNorm, "post_ffw_norm.weight"),
];

/// Names in a GGUF file (the GGUF specification's standardised tensor names).
pub const GGUF_NAMES: NameTable = NameTable {
    embed: "token_embd.weight",
    rope_factors: "rope_freqs.weight",
    output_norm: "output_norm.weight",
    lm_head: "output.weight",
    layer: "blk.",
    in_layer: &[
        GGUF_NORMS,
        &[
            (LayerSlot::Q, "attn_q.weight"),
            (LayerSlot::K, "attn_k.weight"),
            (LayerSlot::V, "attn_v.weight"),
            (LayerSlot::QBias, "attn_q.bias"),
            (LayerSlot::KBias, "attn_k.bias"),
            (LayerSlot::VBias, "attn_v.bias"),
            (LayerSlot::QNorm, "attn_q_norm.weight"),
            (LayerSlot::KNorm, "attn_k_norm.weight"),
            (LayerSlot::O, "attn_output.weight"),
        ],
        &[
            (LayerSlot::Gate, "ffn_gate.weight"),
            (LayerSlot::Up, "ffn_up.weight"),
            (LayerSlot::Down, "ffn_down.weight"),
            (LayerSlot::Router, "ffn_gate_inp.weight"),
            (LayerSlot::Experts(ExpertPart::Gate), "ffn_gate_exps.weight"),
            (LayerSlot::Experts(ExpertPart::Up), "ffn_up_exps.weight"),
            (LayerSlot::Experts(ExpertPart::Down), "ffn_down_exps.weight"),
        ],
    ],
    ignored_endings: &[],
};

/// Names in a GGUF file of Phi-3: the fused gate and up go by the name of up.
pub const FUSED_GGUF_NAMES: NameTable = NameTable {
    rope_factors: "rope_factors_short.weight",
    in_layer: &[
        GGUF_NORMS,
        &[
            (LayerSlot::Qkv, "attn_qkv.weight"),
            (LayerSlot::O, "attn_output.weight"),
            (LayerSlot::GateUp, "ffn_up.weight"),
            (LayerSlot::Down, "ffn_down.weight"),
        ],
    ],
    // Those of positions that are refused (the context ends where they would begin).
    ignored_endings: &["rope_factors_long.weight"],
    ..GGUF_NAMES
};

impl NameTable {
    /// The places of a layer that this container can store, each once, experts' with the number 0.
    pub fn parts(&self) -> impl Iterator<Item = LayerSlot> {
        self.in_layer.iter().flat_map(|names| names.iter().map(|&(part, _)| part))
    }

    /// The name of a slot; None if this container does not store it as such.
    pub fn name(&self, slot: Slot) -> Option<String> {
        match slot {
            Slot::Embed => Some(self.embed.to_owned()),
            Slot::OutputNorm => Some(self.output_norm.to_owned()),
            Slot::LmHead => Some(self.lm_head.to_owned()),
            Slot::Layer(layer, part) => {
                let (named, expert) = match part {
                    LayerSlot::Expert(expert, matrix) => (LayerSlot::Expert(0, matrix), expert),
                    other => (other, 0),
                };
                let mut names = self.in_layer.iter().flat_map(|names| names.iter());
                let (_, ending) = names.find(|(part, _)| *part == named)?;
                Some(format!("{}{layer}.{}", self.layer, ending.replace("{}", &expert.to_string())))
            }
        }
    }

    /// True if the tensor called `name` is passed over.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored_endings.iter().any(|ending| name.ends_with(ending))
    }
}
