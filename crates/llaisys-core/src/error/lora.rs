use thiserror::Error;

/// A rejected LoRA adapter, or a wrong use of one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the error text names each field")]
pub enum LoraError {
    /// A matrix in a layer that the settings exclude.
    #[error(
        "tensor {name:?} is in layer {layer}, which layers_to_transform of adapter_config.json does not list"
    )]
    ExtraLayer { name: String, layer: usize },
    /// A module without A or without B.
    #[error("module {module:?} of the adapter needs both matrices, A and B, but has one of them")]
    OneMatrix { module: String },
    /// A GGUF file of another architecture.
    #[error("the adapter belongs to a model of the GGUF architecture {found:?}, this one has {own:?}")]
    Architecture { found: String, own: &'static str },
    /// A rank above the limit.
    #[error(
        "module {module:?} of the adapter has rank {rank}, max_lora_rank is {max_rank}; raise max_lora_rank"
    )]
    Rank { module: String, rank: usize, max_rank: usize },
    /// An adapter without matrices.
    #[error("the adapter has no matrices")]
    Empty,
    /// A listed module without matrices.
    #[error("target_modules of adapter_config.json lists {target:?}, but module {module:?} has no matrices")]
    Missing { module: String, target: String },
    /// An infinity or NaN.
    #[error("tensor {name:?} of the adapter holds an infinity or NaN")]
    NotFinite { name: String },
    /// A slot without an adapter.
    #[error("there is no LoRA adapter in slot {slot}")]
    NotLoaded { slot: u32 },
    /// An adapter that is in use.
    #[error("the LoRA adapter in slot {slot} is used by {n_sequences} sequences; release them first")]
    InUse { slot: u32, n_sequences: usize },
    /// A sequence whose cells were computed with another adapter.
    #[error("sequence slot {slot} has cells already; set its LoRA adapter before its first row")]
    NotEmpty { slot: u32 },
    /// Sequences that would share cells although their adapters differ.
    #[error("sequence slots {first} and {second} have different LoRA adapters and cannot share cells")]
    Differ { first: u32, second: u32 },
}

impl From<LoraError> for crate::error::Error {
    fn from(error: LoraError) -> Self {
        Self::Rejected(error.into())
    }
}
