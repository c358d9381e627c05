//! A hash of what keys and values depend on other than tokens and positions. Contexts with equal fingerprints may
//! exchange cells.

use super::ContextConfig;
use crate::arch::config::ModelConfig;
use crate::arch::delta_net::DeltaNet;
use crate::arch::experts::Experts;
use crate::arch::gemma4::{Gemma4, Placeholders};
use crate::arch::recurrent::RecurrentLayer;
use crate::arch::rope::{QueryScaling, RopeConfig, RopeScaling};
use crate::arch::short_conv::ShortConv;
use crate::arch::spec::{Activation, ArchSpec, QkNorm, RopeRows};
use crate::dtype::{ComputeMode, KvDType};
use crate::error::Result;
use crate::load::checkpoint::Checkpoint;
use crate::ops::{ClampedSilu, DeltaHeads, Gate, KvHeads, ValueOrder};
use std::fmt::Display;
use xxhash_rust::xxh3::Xxh3;

/// Increased when the same inputs produce different keys or values, or when the layout of a cell or the hashed text
/// changes. An increase makes saved session files unusable.
const KV_FORMAT: u32 = 2;

/// The hashes of tensors follow the names of each group of this many bytes. Session files contain fingerprints, so this
/// must not change.
const GROUP_BYTES: usize = 16 << 20;

/// A 128-bit XXH3 (xxhash.com) over the model's configuration and all its tensors, as the checkpoint has them,
/// their number formats, and the layout of a cell. It distinguishes files; it does not protect against forgery.
///
/// Session files contain fingerprints, so every hashed name is a literal in this file or a public name: renaming a
/// field or a variant changes no fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(u128);

impl Fingerprint {
    /// Uses the hashes that were computed while the weights were loaded, and reads only the tensors that the model
    /// ignores. `backend_format` names what computes and the type of a cell. Errors: as [`Checkpoint::hashes`].
    pub(crate) fn new(checkpoint: &Checkpoint, config: &ContextConfig, backend_format: &str) -> Result<Self> {
        let mut hasher = Xxh3::new();
        hasher.update(&KV_FORMAT.to_le_bytes());
        let mut text = Text::default();
        text.model(checkpoint.config());
        text.put("mode", mode_name(config.mode));
        text.put("backend", backend_format);
        // The bytes of a cell are ordered by rank.
        text.put("ranks", config.n_ranks);
        hasher.update(text.0.as_bytes());
        let (mut hashes, mut n_bytes) = (Vec::new(), 0);
        for tensor in checkpoint.hashes() {
            let (tensor, hash) = tensor?;
            let (name, dtype) = (&tensor.name, tensor.dtype.name());
            hasher.update(format!("{name} {dtype} {:?}", tensor.shape).as_bytes());
            hashes.extend(hash.to_le_bytes());
            n_bytes += tensor.range.len();
            if n_bytes >= GROUP_BYTES {
                hasher.update(&hashes);
                hashes.clear();
                n_bytes = 0;
            }
        }
        hasher.update(&hashes);
        Ok(Self(hasher.digest128()))
    }

    /// Returns the fingerprint after one of the weights was replaced.
    pub(crate) fn with_replaced(self, name: &str, values: &[f32]) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&self.0.to_le_bytes());
        hasher.update(name.as_bytes());
        values.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
        Self(hasher.digest128())
    }
}

/// Lines `key=value`. Floats are written as the hexadecimal digits of their bits.
#[derive(Default)]
struct Text(String);

impl Text {
    fn put(&mut self, key: &str, value: impl Display) {
        self.0 += &format!("{key}={value}\n");
    }

    fn f32(&mut self, key: &str, value: f32) {
        self.put(key, format_args!("{:08x}", value.to_bits()));
    }

    fn f64(&mut self, key: &str, value: f64) {
        self.put(key, format_args!("{:016x}", value.to_bits()));
    }

    /// Writes everything of a configuration except names of tensors (which are hashed with the tensors) and token ids.
    /// The patterns name every field, so that a new one is a compile error here.
    fn model(&mut self, config: &ModelConfig) {
        let ModelConfig {
            arch,
            names: _,
            wrapper: _,
            norm_offset,
            n_layers,
            d_model,
            n_heads,
            n_kv_heads,
            d_head,
            d_ff,
            vocab_size,
            max_positions,
            rms_eps,
            d_rope,
            rope,
            // `rope` is the chosen one.
            long_rope: _,
            local_rope,
            rotated,
            query_scaling,
            window,
            windowed,
            recurrent_layer,
            recurrent,
            score_scale,
            attn_soft_cap,
            logit_soft_cap,
            embed_scale,
            residual_scale,
            logit_scale,
            gate,
            experts,
            d_shared,
            gemma4,
            tied_head,
            qkv_bias,
            o_bias,
            mlp_bias,
            qk_norm,
            bos: _,
            eos: _,
        } = config;
        self.arch(arch);
        self.f32("norm_offset", *norm_offset);
        self.put("n_layers", n_layers);
        self.put("d_model", d_model);
        self.put("n_heads", n_heads);
        self.put("n_kv_heads", n_kv_heads);
        self.put("d_head", d_head);
        self.put("d_ff", d_ff);
        self.put("vocab_size", vocab_size);
        self.put("max_positions", max_positions);
        self.f32("rms_eps", *rms_eps);
        self.rope("rope", rope);
        if let Some(rope) = local_rope {
            self.rope("local_rope", rope);
        }
        // What most models do not have is written only where it is present, so that their text stays the same.
        if d_rope != d_head {
            self.put("d_rope", d_rope);
        }
        if rotated.contains(&false) {
            self.layers("rotated", rotated);
        }
        if let Some(QueryScaling { beta, original }) = query_scaling {
            self.f64("query_scaling.beta", *beta);
            self.f64("query_scaling.original", *original);
        }
        if let Some(window) = window {
            self.put("window", window);
            self.layers("windowed", windowed);
        }
        self.f32("score_scale", *score_scale);
        for (key, cap) in [("attn_soft_cap", attn_soft_cap), ("logit_soft_cap", logit_soft_cap)] {
            if let Some(cap) = cap {
                self.f32(key, *cap);
            }
        }
        self.f32("embed_scale", *embed_scale);
        self.f32("residual_scale", *residual_scale);
        self.f32("logit_scale", *logit_scale);
        if let Gate::ClampedSilu(ClampedSilu { limit, alpha }) = gate {
            self.f32("gate.limit", *limit);
            self.f32("gate.alpha", *alpha);
        }
        if let Some(experts) = experts {
            self.experts(experts);
        }
        if let Some(d_shared) = d_shared {
            self.put("d_shared", d_shared);
        }
        if let Some(gemma4) = gemma4 {
            self.gemma4(gemma4);
        }
        if let Some(layer) = recurrent_layer {
            self.recurrent_layer(layer);
            self.layers("recurrent", recurrent);
        }
        self.put("tied_head", tied_head);
        self.put("qkv_bias", qkv_bias);
        // Only where they are true: session files of models without them stay usable.
        for (key, has_bias) in [("o_bias", o_bias), ("mlp_bias", mlp_bias)] {
            if *has_bias {
                self.put(key, has_bias);
            }
        }
        self.put("qk_norm", qk_norm);
    }

    fn experts(&mut self, experts: &Experts) {
        let Experts { n, n_used, normalize, sigmoid, projection_biases, has_bias, scale, n_dense, d_dense } =
            experts;
        self.put("n_experts", n);
        self.put("n_experts_used", n_used);
        self.put("normalize_experts", normalize);
        if *sigmoid {
            self.put("sigmoid_experts", has_bias);
            self.f32("scale_experts", *scale);
        }
        if *projection_biases {
            self.put("expert_biases", projection_biases);
        }
        if *n_dense > 0 {
            self.put("dense_layers", format_args!("{n_dense} {d_dense}"));
        }
    }

    fn gemma4(&mut self, gemma4: &Gemma4) {
        let Gemma4 { full_heads, values_are_keys, n_shared, widens_shared, d_input, placeholders } = gemma4;
        let KvHeads { n_kv_heads, d_head } = full_heads;
        self.put("full_heads", format_args!("{n_kv_heads} {d_head}"));
        self.put("values_are_keys", values_are_keys);
        self.put("kv_shared", format_args!("{n_shared} {widens_shared}"));
        self.put("d_input", d_input);
        let Placeholders { ids, embeds_as } = placeholders;
        ids.iter().flatten().for_each(|id| self.put("placeholder", format_args!("{id} {embeds_as}")));
    }

    fn recurrent_layer(&mut self, layer: &RecurrentLayer) {
        match layer {
            RecurrentLayer::DeltaNet(DeltaNet { heads, n_taps }) => {
                let DeltaHeads { n_keys, n_values, d_key, d_value, order } = heads;
                self.put("delta_net", format_args!("{n_keys} {n_values} {d_key} {d_value} {n_taps}"));
                self.put(
                    "delta_net.order",
                    match order {
                        ValueOrder::Grouped => "grouped",
                        ValueOrder::Alternating => "alternating",
                    },
                );
            }
            RecurrentLayer::ShortConv(ShortConv { channels, n_taps }) => {
                self.put("short_conv", format_args!("{channels} {n_taps}"));
            }
        }
    }

    /// Writes a 1 for each layer that has a property, and a 0 for each other one.
    fn layers(&mut self, key: &str, layers: &[bool]) {
        let layers: String = layers.iter().map(|&has| if has { '1' } else { '0' }).collect();
        self.put(key, layers);
    }

    /// Writes what the forward pass uses of an architecture. The rest is defaults, which [`ModelConfig`] contains.
    fn arch(&mut self, arch: &ArchSpec) {
        self.put("architecture", arch.architecture);
        let qk_norm = match arch.qk_norm {
            QkNorm::None => "none",
            QkNorm::Head => "head",
            QkNorm::RotatedHead => "rotated_head",
            QkNorm::Projection => "projection",
        };
        self.put("arch.qk_norm", qk_norm);
        self.put("arch.pre_norms", arch.pre_norms);
        self.put("arch.post_norms", arch.post_norms);
        let activation = match arch.activation {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::ClampedSilu => "clamped_silu",
        };
        self.put("arch.activation", activation);
        if arch.attn_sinks {
            self.put("arch.attn_sinks", arch.attn_sinks);
        }
        let rows = |rows| match rows {
            RopeRows::HalfSplit => "half_split",
            RopeRows::Interleaved => "interleaved",
        };
        self.put("arch.gguf_rope_rows", rows(arch.gguf_rope_rows));
        if arch.folder_rope_rows != RopeRows::HalfSplit {
            self.put("arch.folder_rope_rows", rows(arch.folder_rope_rows));
        }
    }

    fn rope(&mut self, key: &str, RopeConfig { theta, scaling }: &RopeConfig) {
        self.f64(&format!("{key}.theta"), *theta);
        let (name, values) = match scaling {
            RopeScaling::None => ("none", vec![]),
            RopeScaling::Linear { factor } => ("linear", vec![("factor", *factor)]),
            RopeScaling::Llama3 { factor, low, high, original } => {
                ("llama3", vec![("factor", *factor), ("low", *low), ("high", *high), ("original", *original)])
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original, truncate, amplitude } => {
                self.put(&format!("{key}.truncate"), truncate);
                let values = [
                    ("factor", *factor),
                    ("beta_fast", *beta_fast),
                    ("beta_slow", *beta_slow),
                    ("original", *original),
                    ("amplitude", *amplitude),
                ];
                ("yarn", values.to_vec())
            }
            RopeScaling::PerPair { factors, amplitude } => {
                factors.iter().for_each(|factor| self.f32(&format!("{key}.pair"), *factor));
                ("per_pair", vec![("amplitude", *amplitude)])
            }
        };
        self.put(&format!("{key}.scaling"), name);
        values.into_iter().for_each(|(name, value)| self.f64(&format!("{key}.{name}"), value));
    }
}

fn mode_name(mode: ComputeMode) -> &'static str {
    match mode {
        ComputeMode::Auto => "auto",
        ComputeMode::Float32 => "float32",
        ComputeMode::Bfloat16 => "bfloat16",
        ComputeMode::Int8 => "int8",
        ComputeMode::Int4 => "int4",
    }
}

/// Returns the text that stands for a type of cells in the `backend_format` of [`Fingerprint::new`].
pub(crate) fn kv_dtype_name(dtype: KvDType) -> &'static str {
    match dtype {
        KvDType::Float32 => "float32",
        KvDType::Float16 => "float16",
        KvDType::Bfloat16 => "bfloat16",
        KvDType::Int8 => "int8",
    }
}

impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
