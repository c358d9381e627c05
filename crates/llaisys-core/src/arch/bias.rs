//! The biases of projections: which ones an architecture has, and where a model states them. Experts have none, except those of gpt-oss.

/// Whether projections add a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// Never; a model that states one is rejected.
    Never,
    /// In every model.
    Always,
    /// In models whose `config.json` has this flag. In a GGUF file: if the first layer has such a tensor.
    Stated {
        /// The flag.
        key: &'static str,
        /// Its value where it is absent.
        default: bool,
    },
}

/// The biases of an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Biases {
    /// Of the q, k and v projections.
    pub qkv: Bias,
    /// Of the output projection of attention.
    pub o: Bias,
    /// Of the gate, up and down projections.
    pub mlp: Bias,
}

/// Every key of `config.json` that switches biases on.
pub(crate) const BIAS_KEYS: [&str; 4] = ["attention_bias", "attention_out_bias", "mlp_bias", "use_bias"];

const ATTENTION: Bias = Bias::Stated { key: "attention_bias", default: false };
const ATTENTION_DEFAULT: Bias = Bias::Stated { key: "attention_bias", default: true };
const USE_BIAS: Bias = Bias::Stated { key: "use_bias", default: false };
const MLP: Bias = Bias::Stated { key: "mlp_bias", default: false };

impl Biases {
    /// No biases.
    pub const NONE: Self = Self { qkv: Bias::Never, o: Bias::Never, mlp: Bias::Never };
    /// The keys of Llama: `attention_bias` is for all four projections of attention.
    pub const LLAMA: Self = Self { qkv: ATTENTION, o: ATTENTION, mlp: MLP };
    /// As in Llama, but never in the feed-forward block.
    pub const ATTENTION: Self = Self { mlp: Bias::Never, ..Self::LLAMA };
    /// Always in the q, k and v projections.
    pub const QKV: Self = Self { qkv: Bias::Always, ..Self::NONE };
    /// The keys of Seed-OSS: one for each part, and q, k and v have a bias by default.
    pub const SEED_OSS: Self = Self {
        qkv: ATTENTION_DEFAULT,
        o: Bias::Stated { key: "attention_out_bias", default: false },
        mlp: MLP,
    };

    /// The key of gpt-oss, whose projections of attention have a bias by default. Those of experts are not stated.
    pub const GPT_OSS: Self = Self { qkv: ATTENTION_DEFAULT, o: ATTENTION_DEFAULT, mlp: Bias::Never };

    /// The key of ERNIE 4.5, for all projections.
    pub const ERNIE: Self = Self { qkv: USE_BIAS, o: USE_BIAS, mlp: USE_BIAS };

    /// True if `key` of `config.json` states one of these biases, or has no effect because its bias is always there.
    pub(crate) fn reads(&self, key: &str) -> bool {
        let states = |bias: Bias| matches!(bias, Bias::Stated { key: stated, .. } if stated == key);
        let is_always = self.qkv == Bias::Always && key == "attention_bias";
        is_always || [self.qkv, self.o, self.mlp].into_iter().any(states)
    }
}
