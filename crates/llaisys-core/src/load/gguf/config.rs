//! Reads [`ModelConfig`] from the metadata of a GGUF file.
//!
//! Keys are those of the GGUF specification, `<architecture>.…`. Unimplemented keys that would change the output are
//! rejected by name.

mod experts;
mod gemma4;
mod recurrent;

use crate::arch::bias::Bias;
use crate::arch::bounds::bounded;
use crate::arch::config::{ModelConfig, add_ids};
use crate::arch::rope::{
    LocalRope, LongRope, QueryScaling, RopeConfig, RopeScaling, longrope_amplitude, yarn_amplitude,
};
use crate::arch::spec::{self, ArchSpec, LayerWeight, QkNorm, WeightId, WindowRule};
use crate::error::{FormatError, Result, Unsupported};
use crate::load::gguf::Header;
use crate::load::gguf::keys::{Keys, expect_length, required};
use crate::load::gguf::metadata::Value;
use crate::load::gguf::tokenizer::{DECODERS, GgufTokenizer};
use crate::load::tensor_files::StoredTensor;
use crate::ops::KvHeads;

/// llama.cpp's default where the file has no base.
const ROPE_THETA_DEFAULT: f64 = 10_000.0;
const WINDOW_KEY: &str = "attention.sliding_window";
const WINDOWED_KEY: &str = "attention.sliding_window_pattern";
const EOS_KEYS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// What is read from the header of a decoder's file.
pub(in crate::load) struct ModelHeader {
    pub(in crate::load) config: ModelConfig,
    pub(in crate::load) tokenizer: GgufTokenizer,
    /// As in [`ModelInfo`](crate::load::model_info::ModelInfo).
    pub(in crate::load) pooling_type: Option<u64>,
    pub(in crate::load) tensors: Vec<StoredTensor>,
}

/// Reads the header of a GGUF file.
///
/// Errors: damage, a missing or wrong key; [`Unsupported`] for what the forward pass or the tokenizer does not
/// implement.
pub(in crate::load) fn read(header: &Header<'_>) -> Result<ModelHeader> {
    let keys = Keys::of(header)?;
    let Keys { metadata, architecture } = keys;
    // An unknown architecture is reported before any error in its keys.
    spec::find(architecture, |arch| arch.gguf_architecture)?;
    let n_experts = keys.size("expert_count")?.unwrap_or(0);
    let has_window = keys.size(WINDOW_KEY)?.is_some_and(|window| window > 0);
    let arch = spec::find_gguf(architecture, n_experts, has_window)?;
    reject_unsupported(&keys, arch)?;
    reject_single_experts(header)?;
    let tokenizer = GgufTokenizer::read(metadata, DECODERS)?;

    let n_heads = keys.required_size("attention.head_count")?;
    let d_model = keys.required_size("embedding_length")?;
    let vocab_size = keys.size("vocab_size")?.unwrap_or(tokenizer.tokens.len());
    let mut stated = Vec::new();
    for key in EOS_KEYS {
        let id = metadata.uint(key)?.map(|id| u32::try_from(id).unwrap_or(u32::MAX));
        add_ids(&mut stated, id.as_slice());
    }
    let own = end_tokens(arch, &tokenizer);
    let eos = if own.is_empty() { stated } else { own };
    let n_layers = keys.required_size("block_count")?;
    let gemma4 = gemma4::read(&keys, header, arch, n_layers)?;
    let KvHeads { n_kv_heads, d_head } = match &gemma4 {
        Some(sizes) => sizes.window_heads,
        None => KvHeads {
            n_kv_heads: recurrent::n_kv_heads(&keys, arch, n_layers)?.unwrap_or(n_heads),
            d_head: d_head(&keys, d_model, n_heads)?,
        },
    };
    let max_positions = keys.required_size("context_length")?;
    let (rope, long_rope) = rope(&keys, header, arch, max_positions)?;
    let d_ff = match (keys.size("expert_feed_forward_length")?.filter(|_| n_experts > 0), &gemma4) {
        (Some(d_ff), _) => d_ff,
        (None, Some(sizes)) => sizes.d_ff,
        (None, None) => keys.required_size("feed_forward_length")?,
    };
    let mut config = ModelConfig {
        arch,
        names: arch.gguf_names,
        wrapper: None,
        norm_offset: 0.0,
        n_layers,
        d_model,
        n_heads,
        n_kv_heads,
        d_head,
        d_ff,
        vocab_size,
        max_positions,
        rms_eps: keys.required_float("attention.layer_norm_rms_epsilon")? as f32,
        // Gemma 4's key is for layers without a window.
        d_rope: keys.size("rope.dimension_count")?.filter(|_| gemma4.is_none()).unwrap_or(d_head),
        local_rope: local_rope(&keys, arch, &rope)?,
        rope,
        long_rope,
        rotated: Vec::new(),
        query_scaling: query_scaling(&keys, arch, max_positions)?,
        window: None,
        windowed: Vec::new(),
        recurrent_layer: recurrent::layer(&keys, arch, d_model)?,
        recurrent: Vec::new(),
        score_scale: score_scale(&keys, arch, &ModelSizes { n_layers, d_model, n_heads, d_head })?,
        attn_soft_cap: keys.soft_cap("attn_logit_softcapping", arch.attn_soft_cap)?,
        logit_soft_cap: keys.soft_cap("final_logit_softcapping", arch.logit_soft_cap)?,
        embed_scale: if arch.embed_sqrt {
            (d_model as f32).sqrt()
        } else {
            keys.multiplier("embedding_scale")?
        },
        residual_scale: keys.multiplier("residual_scale")?,
        logit_scale: 1.0 / keys.multiplier("logit_scale")?,
        gate: arch.activation.gate(),
        experts: experts::read(&keys, arch, n_experts, d_ff, gemma4.as_ref().map(|sizes| sizes.d_ff))?,
        d_shared: recurrent::d_shared(&keys, arch)?,
        gemma4: gemma4.map(|sizes| sizes.gemma4),
        tied_head: !header.tensor_names().any(|name| name == arch.gguf_names.lm_head),
        qkv_bias: has_bias(header, arch, arch.biases.qkv, LayerWeight::QKV_BIASES),
        o_bias: has_bias(header, arch, arch.biases.o, &[LayerWeight::OBias]),
        mlp_bias: has_bias(header, arch, arch.biases.mlp, LayerWeight::MLP_BIASES),
        qk_norm: arch.qk_norm != QkNorm::None,
        bos: tokenizer.bos,
        eos,
    };
    if config.gemma4.is_none() {
        keys.expect_whole_head_rotated(arch, d_head)?;
    }
    config.check()?;
    config.recurrent = recurrent::layers(&keys, arch, n_layers)?;
    config.rotated = rotated_layers(arch, n_layers);
    (config.window, config.windowed) = window(&keys, arch, n_layers, max_positions)?;
    if let Some(gemma4) = config.gemma4 {
        gemma4.check_layers(&config.windowed)?;
    }
    if tokenizer.tokens.len() != vocab_size {
        let (got, want) = (tokenizer.tokens.len() as u64, vocab_size as u64);
        let disagree = FormatError::Disagree { what: "the number of tokens", got, other: "vocab_size", want };
        return Err(disagree.into());
    }
    let (pooling_type, tensors) = (keys.pooling_type()?, header.tensors()?);
    Ok(ModelHeader { config, tokenizer, pooling_type, tensors })
}

/// Returns the ids of the architecture's own end tokens.
fn end_tokens(arch: &ArchSpec, tokenizer: &GgufTokenizer) -> Vec<u32> {
    let id_of = |end: &&str| tokenizer.tokens.iter().position(|token| token == end);
    arch.gguf_end_tokens.iter().filter_map(id_of).filter_map(|id| u32::try_from(id).ok()).collect()
}

fn d_head(keys: &Keys<'_>, d_model: usize, n_heads: usize) -> Result<usize> {
    let (key, value) = (keys.size("attention.key_length")?, keys.size("attention.value_length")?);
    if let (Some(key), Some(value)) = (key, value)
        && key != value
    {
        return Err(Unsupported::feature(
            "heads of unequal width",
            format!("{key} and {value}"),
            "keys as wide as values",
        )
        .into());
    }
    if let Some(d_head) = key.or(value) {
        return Ok(d_head);
    }
    let (what, of) = ("embedding_length", "attention.head_count");
    let uneven = FormatError::NotAMultiple { what, got: d_model, of, divisor: n_heads };
    Ok(d_model.checked_div(n_heads).filter(|_| d_model.is_multiple_of(n_heads)).ok_or(uneven)?)
}

/// Returns whether the model has the biases `parts`: by the architecture's rule, or if the first layer has one of them. A
/// file with only some of them lacks the others.
fn has_bias(header: &Header<'_>, arch: &ArchSpec, rule: Bias, parts: &[LayerWeight]) -> bool {
    let is_stored = |&part: &LayerWeight| {
        let name = arch.gguf_names.name(WeightId::Layer(0, part));
        header.tensor_names().any(|tensor| Some(tensor) == name.as_deref())
    };
    match rule {
        Bias::Never => false,
        Bias::Always => true,
        Bias::Stated { .. } => parts.iter().any(is_stored),
    }
}

/// Reads the rotary embedding of layers without a window, and that of long contexts.
fn rope(
    keys: &Keys<'_>,
    header: &Header<'_>,
    arch: &ArchSpec,
    max_positions: usize,
) -> Result<(RopeConfig, Option<LongRope>)> {
    let theta = keys.float("rope.freq_base")?.unwrap_or(ROPE_THETA_DEFAULT);
    let original = keys.size("rope.scaling.original_context_length")?;
    // llama.cpp's converter writes the frequency factors of llama3 and longrope as a tensor, without a key.
    let has = |name: &str| header.tensor_names().any(|tensor| tensor == name);
    let has_factors = has(arch.gguf_names.rope_factors);
    let kind = keys.metadata.str(&keys.full("rope.scaling.type"))?.unwrap_or("none");
    let factor = keys.float("rope.scaling.factor")?.filter(|&factor| factor != 0.0);
    let attn_factor = keys.float("rope.scaling.attn_factor")?.filter(|&factor| factor != 0.0);
    let scaling = match kind {
        "none" | "longrope" if has_factors => {
            let long = has(arch.gguf_names.rope_factors_long);
            let original = original.filter(|_| long).unwrap_or(max_positions).min(max_positions);
            let derived = longrope_amplitude(max_positions as f64 / original as f64, original);
            let scaling = RopeScaling::PerPair { factors: vec![], amplitude: attn_factor.unwrap_or(derived) };
            let rope = RopeConfig { theta, scaling };
            return Ok((rope.clone(), long.then_some(LongRope { original, rope })));
        }
        "none" => {
            keys.expect_neutral("rope.scaling.factor", &[0.0, 1.0])?;
            keys.expect_neutral("rope.scale_linear", &[0.0, 1.0])?;
            RopeScaling::None
        }
        "linear" => RopeScaling::Linear { factor: required(factor, &keys.full("rope.scaling.factor"))? },
        "yarn" => {
            if !arch.rope.scaled_queries {
                keys.expect_neutral("rope.scaling.yarn_log_multiplier", &[0.0])?;
            }
            let beta = |name: &str| keys.float(&format!("rope.scaling.yarn_beta_{name}"));
            let factor = required(factor, &keys.full("rope.scaling.factor"))?;
            // `mscale_all_dim` of the folder, where `mscale` is 1.
            let all = keys.float("rope.scaling.yarn_log_multiplier")?.filter(|&all| all != 0.0);
            let derived = yarn_amplitude(factor, 1.0) / all.map_or(1.0, |all| yarn_amplitude(factor, all));
            RopeScaling::Yarn {
                factor,
                beta_fast: beta("fast")?.unwrap_or(32.0),
                beta_slow: beta("slow")?.unwrap_or(1.0),
                original: original.unwrap_or(max_positions) as f64,
                truncate: arch.rope.gguf_yarn_truncates,
                amplitude: derived * attn_factor.unwrap_or(1.0),
            }
        }
        other => {
            return Err(Unsupported::feature(
                "the rope type",
                other,
                "none, linear, yarn, factors as a tensor",
            )
            .into());
        }
    };
    Ok((RopeConfig { theta, scaling }, None))
}

/// Reads the rotary embedding of layers with a window, where the architecture has a separate one.
fn local_rope(keys: &Keys<'_>, arch: &ArchSpec, rope: &RopeConfig) -> Result<Option<RopeConfig>> {
    let default = match arch.rope.local {
        LocalRope::Same => return Ok(None),
        LocalRope::Base(default) => default,
        LocalRope::Unscaled => rope.theta,
    };
    Ok(Some(RopeConfig::plain(keys.float("rope.freq_base_swa")?.unwrap_or(default))))
}

/// Returns which layers are rotated; a GGUF file has no key for it.
fn rotated_layers(arch: &ArchSpec, n_layers: usize) -> Vec<bool> {
    let every = arch.rope.unrotated_every;
    (0..n_layers).map(|layer| every.is_none_or(|every| !(layer + 1).is_multiple_of(every))).collect()
}

/// Reads the scaling of queries by position; 0 means none. Errors: one in an architecture without it.
fn query_scaling(keys: &Keys<'_>, arch: &ArchSpec, max_positions: usize) -> Result<Option<QueryScaling>> {
    const KEY: &str = "attention.temperature_scale";
    if !arch.rope.scaled_queries {
        return keys.expect_neutral(KEY, &[0.0]).map(|()| None);
    }
    let Some(beta) = keys.float(KEY)?.filter(|&beta| beta != 0.0) else { return Ok(None) };
    let original = keys.size("rope.scaling.original_context_length")?.unwrap_or(max_positions) as f64;
    Ok(Some(QueryScaling { beta, original }))
}

/// Reads the window and which layers have it.
fn window(
    keys: &Keys<'_>,
    arch: &ArchSpec,
    n_layers: usize,
    max_positions: usize,
) -> Result<(Option<usize>, Vec<bool>)> {
    let stated = keys.size(WINDOW_KEY)?.filter(|&window| window > 0);
    let windowed: Vec<bool> = match arch.window {
        WindowRule::All(_) => vec![true; n_layers],
        WindowRule::AllButEvery(default) => windowed_layers(keys, default, n_layers)?,
        WindowRule::Unsupported | WindowRule::Switched | WindowRule::SwitchedFromLayer => {
            vec![false; n_layers]
        }
    };
    let active = stated.filter(|&window| window < max_positions);
    let is_listed = matches!(arch.window, WindowRule::AllButEvery(_));
    match active {
        Some(_) if is_listed && !windowed.contains(&true) => Ok((None, windowed)),
        Some(window) if !windowed.contains(&true) => Err(Unsupported::feature(
            "a sliding window of attention",
            format!("{window} of {max_positions} positions"),
            "none in this family",
        )
        .into()),
        active => Ok((active, windowed)),
    }
}

/// Reads which layers have the window: a list, or a number n for all except every n-th.
fn windowed_layers(keys: &Keys<'_>, default: usize, n_layers: usize) -> Result<Vec<bool>> {
    if let Some(listed) = listed_layers(keys, n_layers)? {
        return Ok(listed);
    }
    let n = keys.size(WINDOWED_KEY)?.unwrap_or(default);
    bounded(WINDOWED_KEY, n as f64, 1.0, f64::from(u32::MAX))?;
    Ok((0..n_layers).map(|layer| !(layer + 1).is_multiple_of(n)).collect())
}

/// Reads the list of the layers that have the window; None if the file has none. Errors: one of another length.
fn listed_layers(keys: &Keys<'_>, n_layers: usize) -> Result<Option<Vec<bool>>> {
    let key = keys.full(WINDOWED_KEY);
    let Some(Value::Array(_)) = keys.metadata.get(&key) else { return Ok(None) };
    let listed = required(keys.metadata.bools(&key)?, &key)?;
    expect_length("the length of sliding_window_pattern", listed.len(), n_layers)?;
    Ok(Some(listed))
}

/// The sizes that determine the scale of scores.
struct ModelSizes {
    n_layers: usize,
    d_model: usize,
    n_heads: usize,
    d_head: usize,
}

/// Reads the scale of scores. Granite has a key for it; for Gemma it follows from the sizes.
fn score_scale(keys: &Keys<'_>, arch: &ArchSpec, sizes: &ModelSizes) -> Result<f32> {
    if arch.multipliers {
        let stated = keys.float("attention.scale")?.filter(|&scale| scale != 0.0);
        return Ok(stated.map_or(1.0 / (sizes.d_head as f32).sqrt(), |scale| scale as f32));
    }
    keys.expect_neutral("attention.scale", &[0.0])?;
    if arch.gemma4 {
        return Ok(1.0);
    }
    let by_width = arch.query_scalar.is_some_and(|scalar| scalar.layers_by_width == sizes.n_layers);
    let by_width = sizes.d_model.checked_div(sizes.n_heads).filter(|_| by_width);
    Ok(1.0 / (by_width.unwrap_or(sizes.d_head) as f32).sqrt())
}

fn reject_unsupported(keys: &Keys<'_>, arch: &ArchSpec) -> Result<()> {
    keys.expect_model()?;
    if keys.metadata.bool(&keys.full("attention.causal"))? == Some(false) {
        return Err(Unsupported::feature("attention.causal", false, "causal attention").into());
    }
    if arch.multipliers {
        // llama.cpp's switch of the rotary embedding, in Granite.
        return match keys.metadata.bool(&keys.full("rope.scaling.finetuned"))? {
            Some(false) => {
                Err(Unsupported::feature("rope.scaling.finetuned", false, "true (rotated)").into())
            }
            _ => Ok(()),
        };
    }
    for key in ["logit_scale", "embedding_scale", "residual_scale"] {
        keys.expect_neutral(key, &[0.0, 1.0])?;
    }
    Ok(())
}

/// Rejects the old layout with one tensor for each expert (llama.cpp until April 2024).
fn reject_single_experts(header: &Header<'_>) -> Result<()> {
    let is_single = |name: &str| {
        let mut parts = name.split('.').skip(2);
        matches!(parts.next(), Some("ffn_gate" | "ffn_up" | "ffn_down"))
            && parts.next().is_some_and(|part| part.parse::<u32>().is_ok())
    };
    match header.tensor_names().find(|name| is_single(name)) {
        None => Ok(()),
        Some(name) => Err(Unsupported::feature(
            "an old GGUF layout with one tensor for each expert",
            name,
            "experts stacked in tensors such as blk.0.ffn_gate_exps.weight (convert the model again with a \
             llama.cpp of April 2024 or later, or use a newer file)",
        )
        .into()),
    }
}
