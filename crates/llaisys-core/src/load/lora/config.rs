//! `adapter_config.json`: what PEFT stores of a LoRA adapter besides its matrices.
//!
//! A key that changes the outputs and is not implemented is refused by name, and so is an unknown key unless its value is
//! null, false or empty: then the feature that it belongs to is off.

use crate::arch::bounds::bounded;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::ModelFolder;
use crate::load::folder::fields::Fields;
use serde_json::{Map, Value};

/// The file with the settings of an adapter.
const CONFIG_FILE: &str = "adapter_config.json";
/// Bounds of alpha.
const ALPHA: (f64, f64) = (1e-6, 1e6);
/// Upper bound on the keys of a pattern and on the listed layers and modules.
const LISTED_MAX: usize = 1 << 12;

/// Keys with no effect on the outputs, or that are read below.
const KNOWN: [&str; 27] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
];

/// The settings of an adapter.
#[derive(Debug, Default)]
pub(super) struct LoraConfig {
    /// None: that of the module's matrices.
    rank: Option<usize>,
    /// None: the rank.
    alpha: Option<f64>,
    /// Ranks and alphas of some modules, by their pattern.
    ranks: Vec<(Pattern, f64)>,
    alphas: Vec<(Pattern, f64)>,
    rslora: bool,
    /// The layers with adapters; None: all.
    layers: Option<Vec<usize>>,
    /// The listed modules, if the file lists them plainly: each has a matrix, and no other module.
    pub(super) targets: Option<Vec<String>>,
}

/// The end of the names of modules, or with `^` before it a whole name.
#[derive(Debug)]
struct Pattern(String);

impl Pattern {
    /// Errors: a regular expression that is more than a name.
    fn new(what: &'static str, text: &str) -> Result<Self> {
        let name = text.strip_prefix('^').unwrap_or(text);
        let is_plain =
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c));
        if is_plain && !name.starts_with('.') {
            return Ok(Self(text.to_owned()));
        }
        Err(Unsupported::feature(what, text, "names of modules and their ends").into())
    }

    fn matches(&self, module: &str) -> bool {
        match self.0.strip_prefix('^') {
            Some(whole) => module == whole,
            None => is_end_of(&self.0, module),
        }
    }
}

/// True if `end` is the name of a module or its last parts.
pub(super) fn is_end_of(end: &str, module: &str) -> bool {
    let before = module.strip_suffix(end);
    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

impl LoraConfig {
    /// Reads the settings. Errors: [`FormatError`] for damage, [`Unsupported`] for what is not implemented.
    pub(super) fn read(folder: &ModelFolder) -> Result<Self> {
        let missing = || FormatError::FileMissing { folder: folder.path().to_owned(), name: CONFIG_FILE };
        let map = folder.object(CONFIG_FILE)?.ok_or_else(missing)?;
        let fields = Fields { file: CONFIG_FILE, map: &map };
        check_type(fields)?;
        refuse_unknown(&map)?;
        refuse_initialization(fields)?;
        let rank = fields.required_size("r")?;
        bounded("r of the adapter", rank as f64, 1.0, f64::from(u16::MAX))?;
        let alpha = fields.number("lora_alpha")?.unwrap_or(8.0);
        bounded("lora_alpha of the adapter", alpha, ALPHA.0, ALPHA.1)?;
        Ok(Self {
            rank: Some(rank),
            alpha: Some(alpha),
            ranks: patterns(fields, "rank_pattern")?,
            alphas: patterns(fields, "alpha_pattern")?,
            rslora: fields.flag("use_rslora")?.unwrap_or(false),
            layers: layers(fields)?,
            targets: targets(fields)?,
        })
    }

    /// The settings of an adapter whose matrices state the ranks. `alpha`: None for the rank. Errors: an alpha out of
    /// bounds.
    pub(super) fn of_alpha(alpha: Option<f64>) -> Result<Self> {
        if let Some(alpha) = alpha {
            bounded("adapter.lora.alpha", alpha, ALPHA.0, ALPHA.1)?;
        }
        Ok(Self { alpha, ..Self::default() })
    }

    /// True if the modules of layer `layer` may have matrices.
    pub(super) fn has_layer(&self, layer: usize) -> bool {
        self.layers.as_ref().is_none_or(|layers| layers.contains(&layer))
    }

    /// The rank of a module with matrices of rank `stored`, and the scale of its product. Errors: patterns that disagree,
    /// a rank that is not a whole number from 1.
    pub(super) fn of(&self, module: &str, stored: usize) -> Result<(usize, f32)> {
        let rank = value_of("rank_pattern", &self.ranks, module)?;
        let rank = rank.unwrap_or(self.rank.unwrap_or(stored) as f64);
        let alpha = value_of("alpha_pattern", &self.alphas, module)?.or(self.alpha).unwrap_or(rank);
        bounded("a rank of rank_pattern", rank, 1.0, f64::from(u16::MAX))?;
        bounded("an alpha of alpha_pattern", alpha, ALPHA.0, ALPHA.1)?;
        if rank.fract() != 0.0 {
            return Err(Unsupported::feature("a rank of rank_pattern", rank, "whole numbers").into());
        }
        let divisor = if self.rslora { rank.sqrt() } else { rank };
        Ok((rank as usize, (alpha / divisor) as f32))
    }
}

/// The value of the patterns that match a module. PEFT takes the first in the file; the order of keys is not part of
/// JSON, so patterns with different values are refused.
fn value_of(what: &'static str, patterns: &[(Pattern, f64)], module: &str) -> Result<Option<f64>> {
    let mut values = patterns.iter().filter(|(pattern, _)| pattern.matches(module)).map(|(_, value)| *value);
    let first = values.next();
    match values.find(|&value| Some(value) != first) {
        Some(_) => Err(Unsupported::feature(what, module, "patterns that agree for each module").into()),
        None => Ok(first),
    }
}

fn check_type(fields: Fields<'_>) -> Result<()> {
    match fields.text("peft_type")? {
        Some("LORA") => {}
        other => return Err(Unsupported::feature("peft_type", other.unwrap_or("none"), "LORA").into()),
    }
    match fields.text("task_type")? {
        None | Some("CAUSAL_LM" | "FEATURE_EXTRACTION") => Ok(()),
        Some(other) => Err(Unsupported::feature("task_type of the adapter", other, "CAUSAL_LM").into()),
    }
}

/// Refuses keys that are not in [`KNOWN`] and switch something on.
fn refuse_unknown(map: &Map<String, Value>) -> Result<(), Unsupported> {
    for (key, value) in map.iter().filter(|(key, _)| !KNOWN.contains(&key.as_str())) {
        let is_off = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(text) => key == "bias" && text == "none",
            Value::Bool(true) | Value::Number(_) => false,
        };
        if !is_off {
            let value = format!("{key} = {value}");
            return Err(Unsupported::feature("the LoRA setting", value, "LoRA without it"));
        }
    }
    Ok(())
}

/// Refuses initializations that change the weights of the base model: the matrices belong to the changed ones.
fn refuse_initialization(fields: Fields<'_>) -> Result<(), Unsupported> {
    match fields.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(name)) if ["gaussian", "eva", "orthogonal"].contains(&name.as_str()) => Ok(()),
        Some(other) => {
            let supported = "adapters to the original weights; save it converted (path_initial_model_for_weight_conversion)";
            Err(Unsupported::feature("init_lora_weights", other, supported))
        }
    }
}

fn patterns(fields: Fields<'_>, key: &'static str) -> Result<Vec<(Pattern, f64)>> {
    let Some(object) = fields.object(key)? else { return Ok(Vec::new()) };
    bounded(key, object.map.len() as f64, 0.0, LISTED_MAX as f64)?;
    let expected = "an object of numbers";
    let pair = |(pattern, value): (&String, &Value)| -> Result<(Pattern, f64)> {
        let wrong = FormatError::KeyType { file: CONFIG_FILE, key, expected };
        Ok((Pattern::new(key, pattern)?, value.as_f64().ok_or(wrong)?))
    };
    object.map.iter().map(pair).collect()
}

fn layers(fields: Fields<'_>) -> Result<Option<Vec<usize>>> {
    let key = "layers_to_transform";
    let index = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let wrong = || FormatError::KeyType { file: CONFIG_FILE, key, expected: "a layer or a list of layers" };
    let layers = match fields.get(key) {
        None => return Ok(None),
        Some(Value::Array(layers)) if layers.len() <= LISTED_MAX => layers.iter().map(index).collect(),
        Some(single) => index(single).map(|layer| vec![layer]),
    };
    let layers: Vec<usize> = layers.ok_or_else(wrong)?;
    // PEFT treats an empty list as none.
    Ok(Some(layers).filter(|layers| !layers.is_empty()))
}

/// The listed modules; None if the file names them by a regular expression, or excludes some.
fn targets(fields: Fields<'_>) -> Result<Option<Vec<String>>> {
    let key = "target_modules";
    let wrong = || FormatError::KeyType { file: CONFIG_FILE, key, expected: "a string or a list of strings" };
    let is_excluding = fields.get("exclude_modules").is_some() || fields.get("layers_pattern").is_some();
    match fields.get(key) {
        None => Err(FormatError::KeyMissing { file: CONFIG_FILE, key }.into()),
        Some(Value::String(_)) => Ok(None),
        Some(Value::Array(names)) if names.len() <= LISTED_MAX => {
            let names = names.iter().map(|name| name.as_str().map(str::to_owned));
            let names: Option<Vec<String>> = names.collect();
            let names = names.ok_or_else(wrong)?;
            Ok((!is_excluding).then_some(names))
        }
        Some(_) => Err(wrong().into()),
    }
}
