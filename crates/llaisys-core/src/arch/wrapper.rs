//! Multimodal checkpoints: which tensors are those of the text model, and which are skipped. Decision record 0018 states
//! where an encoder would attach.

/// How a multimodal checkpoint contains its text model, whose configuration is `text_config` of `config.json`.
#[derive(Debug, PartialEq, Eq)]
pub struct Wrapper {
    /// `architectures[0]` of `config.json`.
    pub architecture: &'static str,
    /// The prefix that names of the text model have instead of `model.`.
    pub model: &'static str,
    /// The prefix that names of the head have instead of `lm_head.`.
    pub head: &'static str,
    /// Prefixes of the tensors that are skipped: encoders of images and sound, their projections, and heads that predict
    /// several tokens.
    pub skipped: &'static [&'static str],
    /// Sizes that `text_config` may omit, as transformers defines them.
    pub size_defaults: &'static [(&'static str, usize)],
}

/// Ministral 3 and Mistral Small 3.
pub const MISTRAL3: Wrapper = Wrapper {
    architecture: "Mistral3ForConditionalGeneration",
    model: "language_model.model.",
    head: "language_model.lm_head.",
    skipped: &["vision_tower.", "multi_modal_projector."],
    size_defaults: &[],
};

/// Gemma 3. Published files omit what is the default of `Gemma3TextConfig`.
pub const GEMMA3: Wrapper = Wrapper {
    architecture: "Gemma3ForConditionalGeneration",
    size_defaults: &[
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("max_position_embeddings", 131_072),
    ],
    ..MISTRAL3
};

/// Gemma 4.
pub const GEMMA4: Wrapper = Wrapper {
    architecture: "Gemma4ForConditionalGeneration",
    model: "model.language_model.",
    head: "lm_head.",
    skipped: &["model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."],
    size_defaults: &[],
};

/// Qwen3.5.
pub const QWEN3_5: Wrapper = Wrapper {
    architecture: "Qwen3_5ForConditionalGeneration",
    skipped: &["model.visual.", "mtp."],
    ..GEMMA4
};

/// Qwen3.5 with a mixture of experts.
pub const QWEN3_5_MOE: Wrapper = Wrapper { architecture: "Qwen3_5MoeForConditionalGeneration", ..QWEN3_5 };

/// A checkpoint of the model without a head, whose names have no `model.`: embedding models are published like this.
pub const BARE: Wrapper =
    Wrapper { architecture: "", model: "", head: "lm_head.", skipped: &[], size_defaults: &[] };

/// Every multimodal architecture whose text model can be loaded if its own architecture is supported.
pub static WRAPPERS: [Wrapper; 5] = [MISTRAL3, GEMMA3, GEMMA4, QWEN3_5, QWEN3_5_MOE];

/// Returns the multimodal architecture called `name`.
pub fn find(name: &str) -> Option<&'static Wrapper> {
    WRAPPERS.iter().find(|wrapper| wrapper.architecture == name)
}

impl Wrapper {
    /// Returns the name in the checkpoint of the tensor that a plain checkpoint of the text model calls `name`.
    pub fn name(&self, name: &str) -> String {
        let replaced = |plain: &str, own: &str| Some(format!("{own}{}", name.strip_prefix(plain)?));
        replaced("model.", self.model)
            .or_else(|| replaced("lm_head.", self.head))
            .unwrap_or_else(|| name.to_owned())
    }
}
