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
    /// Output projection, `[d_model, n_heads * d_head]`.
    O,
    /// Norm of each query head, `[d_head]`, with `qk_norm`.
    QNorm,
    /// Norm of each key head, `[d_head]`, with `qk_norm`.
    KNorm,
    /// Norm before the feed-forward part, `[d_model]`.
    FfnNorm,
    /// Gate projection, `[d_ff, d_model]`.
    Gate,
    /// Up projection, `[d_ff, d_model]`.
    Up,
    /// Down projection, `[d_model, d_ff]`.
    Down,
}

impl LayerSlot {
    /// Every place, in the order of the forward pass.
    pub const ALL: [Self; 14] = [
        Self::AttnNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::QBias,
        Self::KBias,
        Self::VBias,
        Self::O,
        Self::QNorm,
        Self::KNorm,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
}

/// How a container spells the names of tensors.
#[derive(Debug)]
pub struct NameTable {
    /// Of [`Slot::Embed`].
    pub embed: &'static str,
    /// Of [`Slot::OutputNorm`].
    pub output_norm: &'static str,
    /// Of [`Slot::LmHead`].
    pub lm_head: &'static str,
    /// What stands before the layer's number and a dot.
    pub layer: &'static str,
    /// What stands after them, for each place.
    pub in_layer: &'static [(LayerSlot, &'static str)],
    /// Endings of names that carry nothing the forward pass needs, and are passed over.
    pub ignored_endings: &'static [&'static str],
}

/// Names in a Hugging Face folder (Llama and its kin in transformers).
pub const FOLDER_NAMES: NameTable = NameTable {
    embed: "model.embed_tokens.weight",
    output_norm: "model.norm.weight",
    lm_head: "lm_head.weight",
    layer: "model.layers.",
    in_layer: &[
        (LayerSlot::AttnNorm, "input_layernorm.weight"),
        (LayerSlot::Q, "self_attn.q_proj.weight"),
        (LayerSlot::K, "self_attn.k_proj.weight"),
        (LayerSlot::V, "self_attn.v_proj.weight"),
        (LayerSlot::QBias, "self_attn.q_proj.bias"),
        (LayerSlot::KBias, "self_attn.k_proj.bias"),
        (LayerSlot::VBias, "self_attn.v_proj.bias"),
        (LayerSlot::O, "self_attn.o_proj.weight"),
        (LayerSlot::QNorm, "self_attn.q_norm.weight"),
        (LayerSlot::KNorm, "self_attn.k_norm.weight"),
        (LayerSlot::FfnNorm, "post_attention_layernorm.weight"),
        (LayerSlot::Gate, "mlp.gate_proj.weight"),
        (LayerSlot::Up, "mlp.up_proj.weight"),
        (LayerSlot::Down, "mlp.down_proj.weight"),
    ],
    // Old checkpoints saved the rope frequencies, which follow from the configuration.
    ignored_endings: &[".rotary_emb.inv_freq"],
};

/// Names in a GGUF file (the GGUF specification's standardised tensor names).
pub const GGUF_NAMES: NameTable = NameTable {
    embed: "token_embd.weight",
    output_norm: "output_norm.weight",
    lm_head: "output.weight",
    layer: "blk.",
    in_layer: &[
        (LayerSlot::AttnNorm, "attn_norm.weight"),
        (LayerSlot::Q, "attn_q.weight"),
        (LayerSlot::K, "attn_k.weight"),
        (LayerSlot::V, "attn_v.weight"),
        (LayerSlot::QBias, "attn_q.bias"),
        (LayerSlot::KBias, "attn_k.bias"),
        (LayerSlot::VBias, "attn_v.bias"),
        (LayerSlot::O, "attn_output.weight"),
        (LayerSlot::QNorm, "attn_q_norm.weight"),
        (LayerSlot::KNorm, "attn_k_norm.weight"),
        (LayerSlot::FfnNorm, "ffn_norm.weight"),
        (LayerSlot::Gate, "ffn_gate.weight"),
        (LayerSlot::Up, "ffn_up.weight"),
        (LayerSlot::Down, "ffn_down.weight"),
    ],
    ignored_endings: &[],
};

impl NameTable {
    /// The name of a slot; None if this container has no name for it.
    pub fn name(&self, slot: Slot) -> Option<String> {
        match slot {
            Slot::Embed => Some(self.embed.to_owned()),
            Slot::OutputNorm => Some(self.output_norm.to_owned()),
            Slot::LmHead => Some(self.lm_head.to_owned()),
            Slot::Layer(layer, part) => {
                let (_, ending) = self.in_layer.iter().find(|(named, _)| *named == part)?;
                Some(format!("{}{layer}.{ending}", self.layer))
            }
        }
    }

    /// True if the tensor called `name` is passed over.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored_endings.iter().any(|ending| name.ends_with(ending))
    }
}
