//! Encoders: transformers whose rows see the whole text. A table with one row for each family, and the configuration of
//! a model. A new family needs a new row, and an op if no existing one fits.

use crate::arch::bounds::bounded;
use crate::error::{FormatError, Unsupported};
use crate::ops::MAX_D_HEAD;

/// The properties of one family that the forward pass and the loader use.
#[derive(Debug)]
pub struct EncoderSpec {
    /// `architectures[0]` of `config.json` of a model that ends with hidden states.
    pub base: &'static str,
    /// That of a model trained to fill in masked tokens. Its head is skipped.
    pub masked: &'static str,
    /// That of a classifier.
    pub classifier: &'static str,
    /// The prefix of the encoder's tensors in models with a head; names of the base model may have it too.
    pub prefix: &'static str,
    /// How a row knows its position.
    pub positions: PositionRule,
    /// Embeddings of token types are added.
    pub has_types: bool,
    /// Norms are before attention and feed-forward block (else after the sum), and after the last layer.
    pub pre_norms: bool,
    /// Projections and norms have a bias.
    pub has_biases: bool,
    /// The feed-forward block has a gate, whose rows are stored over those of up.
    pub is_gated: bool,
    /// The classifier.
    pub head: HeadRule,
    /// The key of the norms' epsilon.
    pub eps_key: &'static str,
    /// The key of the activation, which is gelu.
    pub activation_key: &'static str,
    /// `general.architecture` of a GGUF file.
    pub gguf_architecture: &'static str,
    /// The names of tensors in a folder.
    pub names: EncoderNames,
    /// The names of tensors in a GGUF file, which have no prefix.
    pub gguf_names: EncoderNames,
    /// Prefixes of the tensors that the forward pass does not need.
    pub skipped: &'static [&'static str],
}

/// How a row knows its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PositionRule {
    /// A learned embedding, from 0.
    Learned,
    /// A learned embedding, from `pad_token_id + 1`.
    LearnedAfterPad,
    /// Queries and keys are rotated, with two bases. In layers of the smaller one, rows see a window to both sides.
    Rotated,
}

/// What a classifier computes of the first row's hidden state x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadRule {
    /// `W tanh(D x + c) + b`; D and c are the pooler of the encoder.
    Pooler,
    /// The same, D and c are part of the classifier.
    Dense,
    /// `W norm(gelu(D x)) + b`; x may be the mean of all rows (`classifier_pooling`).
    Normed,
}

/// The names of tensors, without `.weight` and `.bias`. `{}` stands for the number of a layer. Names of the head have no
/// prefix, except that of [`HeadRule::Pooler`]'s dense layer.
#[derive(Debug)]
pub struct EncoderNames {
    /// Token embeddings.
    pub words: &'static str,
    /// Position embeddings.
    pub positions: &'static str,
    /// Token type embeddings.
    pub types: &'static str,
    /// The norm of the embeddings.
    pub embed_norm: &'static str,
    /// Attention's projections q, k, v, or the only one with the rows of all three.
    pub qkv: &'static [&'static str],
    /// Attention's output projection.
    pub o: &'static str,
    /// The norm of attention.
    pub attn_norm: &'static str,
    /// The first projection of the feed-forward block.
    pub up: &'static str,
    /// The second.
    pub down: &'static str,
    /// The norm of the feed-forward block.
    pub ffn_norm: &'static str,
    /// The norm after the last layer.
    pub final_norm: &'static str,
    /// The dense layer of a classifier.
    pub head_dense: &'static str,
    /// The norm of a classifier.
    pub head_norm: &'static str,
    /// The output layer of a classifier.
    pub head_out: &'static str,
}

/// BERT.
pub const BERT: EncoderSpec = EncoderSpec {
    base: "BertModel",
    masked: "BertForMaskedLM",
    classifier: "BertForSequenceClassification",
    prefix: "bert.",
    positions: PositionRule::Learned,
    has_types: true,
    pre_norms: false,
    has_biases: true,
    is_gated: false,
    head: HeadRule::Pooler,
    eps_key: "layer_norm_eps",
    activation_key: "hidden_act",
    names: EncoderNames {
        words: "embeddings.word_embeddings",
        positions: "embeddings.position_embeddings",
        types: "embeddings.token_type_embeddings",
        embed_norm: "embeddings.LayerNorm",
        qkv: &[
            "encoder.layer.{}.attention.self.query",
            "encoder.layer.{}.attention.self.key",
            "encoder.layer.{}.attention.self.value",
        ],
        o: "encoder.layer.{}.attention.output.dense",
        attn_norm: "encoder.layer.{}.attention.output.LayerNorm",
        up: "encoder.layer.{}.intermediate.dense",
        down: "encoder.layer.{}.output.dense",
        ffn_norm: "encoder.layer.{}.output.LayerNorm",
        final_norm: "",
        head_dense: "pooler.dense",
        head_norm: "",
        head_out: "classifier",
    },
    gguf_architecture: "bert",
    gguf_names: EncoderNames {
        words: "token_embd",
        positions: "position_embd",
        types: "token_types",
        embed_norm: "token_embd_norm",
        qkv: &["blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"],
        o: "blk.{}.attn_output",
        attn_norm: "blk.{}.attn_output_norm",
        up: "blk.{}.ffn_up",
        down: "blk.{}.ffn_down",
        ffn_norm: "blk.{}.layer_output_norm",
        final_norm: "",
        head_dense: "cls",
        head_norm: "",
        head_out: "cls.output",
    },
    // Old checkpoints saved the list of positions.
    skipped: &["pooler.", "cls.", "embeddings.position_ids"],
};

/// XLM-RoBERTa.
pub const XLM_ROBERTA: EncoderSpec = EncoderSpec {
    base: "XLMRobertaModel",
    masked: "XLMRobertaForMaskedLM",
    classifier: "XLMRobertaForSequenceClassification",
    prefix: "roberta.",
    positions: PositionRule::LearnedAfterPad,
    head: HeadRule::Dense,
    names: EncoderNames { head_dense: "classifier.dense", head_out: "classifier.out_proj", ..BERT.names },
    skipped: &["pooler.", "lm_head.", "embeddings.position_ids"],
    ..BERT
};

/// ModernBERT.
pub const MODERN_BERT: EncoderSpec = EncoderSpec {
    base: "ModernBertModel",
    masked: "ModernBertForMaskedLM",
    classifier: "ModernBertForSequenceClassification",
    prefix: "model.",
    positions: PositionRule::Rotated,
    has_types: false,
    pre_norms: true,
    has_biases: false,
    is_gated: true,
    head: HeadRule::Normed,
    eps_key: "norm_eps",
    activation_key: "hidden_activation",
    names: EncoderNames {
        words: "embeddings.tok_embeddings",
        positions: "",
        types: "",
        embed_norm: "embeddings.norm",
        qkv: &["layers.{}.attn.Wqkv"],
        o: "layers.{}.attn.Wo",
        attn_norm: "layers.{}.attn_norm",
        up: "layers.{}.mlp.Wi",
        down: "layers.{}.mlp.Wo",
        ffn_norm: "layers.{}.mlp_norm",
        final_norm: "final_norm",
        head_dense: "head.dense",
        head_norm: "head.norm",
        head_out: "classifier",
    },
    gguf_architecture: "modern-bert",
    gguf_names: EncoderNames {
        words: "token_embd",
        positions: "",
        types: "",
        embed_norm: "token_embd_norm",
        qkv: &["blk.{}.attn_qkv"],
        o: "blk.{}.attn_output",
        attn_norm: "blk.{}.attn_norm",
        up: "blk.{}.ffn_up",
        down: "blk.{}.ffn_down",
        ffn_norm: "blk.{}.ffn_norm",
        final_norm: "output_norm",
        head_dense: "cls",
        head_norm: "cls.norm",
        head_out: "cls.output",
    },
    skipped: &["head.", "decoder."],
};

/// Every supported family.
pub static ENCODERS: [EncoderSpec; 3] = [BERT, XLM_ROBERTA, MODERN_BERT];

/// What follows the encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderTask {
    /// Hidden states.
    Embed,
    /// A classifier with one output: a score.
    Score,
}

/// Returns the family and the task of `architectures[0]`; None if it is no encoder.
pub fn find(architecture: &str) -> Option<(&'static EncoderSpec, EncoderTask)> {
    let is_one = |spec: &&EncoderSpec| [spec.base, spec.masked, spec.classifier].contains(&architecture);
    let spec = ENCODERS.iter().find(is_one)?;
    let task = if spec.classifier == architecture { EncoderTask::Score } else { EncoderTask::Embed };
    Some((spec, task))
}

/// The hyper-parameters of an encoder. [`EncoderConfig::check`] has checked every value that is loaded.
#[derive(Debug, Clone)]
pub struct EncoderConfig {
    /// The family.
    pub spec: &'static EncoderSpec,
    /// What follows the encoder.
    pub task: EncoderTask,
    /// `architectures[0]`.
    pub architecture: &'static str,
    /// Layers.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Heads.
    pub n_heads: usize,
    /// Inner width of the feed-forward block.
    pub d_ff: usize,
    /// Rows of the token embeddings.
    pub vocab_size: usize,
    /// Tokens of a text.
    pub max_positions: usize,
    /// The position embedding of a text's first token; 0 without such embeddings.
    pub first_position: usize,
    /// Token types; 0 without such embeddings.
    pub n_types: usize,
    /// Added to variances.
    pub eps: f32,
    /// Bases of the rotation in layers with and without a window.
    pub theta: [f64; 2],
    /// Positions to either side that a row sees in layers with a window.
    pub window: usize,
    /// Every n-th layer, from the first on, has no window.
    pub global_every: usize,
    /// The classifier reads the mean of all rows instead of the first.
    pub pools_mean: bool,
}

type SizeOf = fn(&EncoderConfig) -> usize;

/// Upper bounds of the sizes, inclusive, as of decoders.
const LIMITS: [(&str, SizeOf, usize); 7] = [
    ("the number of layers", |c| c.n_layers, 1 << 10),
    ("the model width", |c| c.d_model, 1 << 17),
    ("the number of heads", |c| c.n_heads, 1 << 10),
    ("the feed-forward width", |c| c.d_ff, 1 << 20),
    ("the vocabulary size", |c| c.vocab_size, 1 << 20),
    ("the number of positions", |c| c.max_positions, 1 << 24),
    ("global_attn_every_n_layers", |c| c.global_every, 1 << 10),
];

impl EncoderConfig {
    /// Elements of a head.
    pub fn d_head(&self) -> usize {
        self.d_model / self.n_heads
    }

    /// True if rows see only a window in layer `index`.
    pub fn is_local(&self, index: usize) -> bool {
        self.spec.positions == PositionRule::Rotated && !index.is_multiple_of(self.global_every)
    }

    /// Rows of the position embeddings.
    pub fn n_position_rows(&self) -> usize {
        self.first_position.saturating_add(self.max_positions)
    }

    /// Checks every value. Errors: a value is out of bounds or not divisible; heads wider than the kernels support.
    pub(crate) fn check(&self) -> Result<(), crate::error::Error> {
        for (what, size, max) in LIMITS {
            bounded(what, size(self) as f64, 1.0, max as f64)?;
        }
        // BERT's is 1e-12, which f32 rounds down.
        bounded("the epsilon of the norms", f64::from(self.eps), 9e-13, 1e-1)?;
        bounded("the number of token types", self.n_types as f64, 0.0, 1024.0)?;
        bounded("pad_token_id", self.first_position as f64, 0.0, f64::from(1 << 20))?;
        for theta in self.theta {
            bounded("the base of the rotary embedding", theta, 1.0, 1e12)?;
        }
        let uneven = |what, got, of, divisor| FormatError::NotAMultiple { what, got, of, divisor };
        if !self.d_model.is_multiple_of(self.n_heads) {
            return Err(uneven("hidden_size", self.d_model, "num_attention_heads", self.n_heads).into());
        }
        if !self.d_head().is_multiple_of(2) {
            return Err(uneven("the head width", self.d_head(), "a pair", 2).into());
        }
        if self.d_head() > MAX_D_HEAD {
            return Err(Unsupported::feature("the head width", self.d_head(), "up to 512").into());
        }
        Ok(())
    }
}
