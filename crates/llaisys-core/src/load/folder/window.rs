//! The sliding window of a folder's model, and the layers that have it.

use crate::arch::bounds::bounded;
use crate::arch::config::ModelConfig;
use crate::arch::spec::WindowRule;
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;

/// transformers' default of `sliding_window` in architectures where it is switched on or alternates.
const WINDOW_DEFAULT: usize = 4096;
/// transformers' default of `max_window_layers`.
const FIRST_LAYER_DEFAULT: usize = 28;

/// Reads the window and the layers that have it. A window as long as the context has no effect and counts as none.
///
/// Errors: a window in an architecture without one, layers of an unknown type.
pub(super) fn read(fields: &Fields<'_>, config: &ModelConfig) -> Result<(Option<usize>, Vec<bool>)> {
    let (window, by_rule) = by_rule(fields, config)?;
    let windowed = match fields.list("layer_types")? {
        None => by_rule,
        Some(kinds) => {
            let (got, want) = (kinds.len() as u64, config.n_layers as u64);
            if got != want {
                let (what, other) = ("the number of layer_types", "num_hidden_layers");
                return Err(FormatError::Disagree { what, got, other, want }.into());
            }
            let kind = |kind: &serde_json::Value| match kind.as_str() {
                // The second is the name of Granite 4.0.
                Some("full_attention" | "attention") => Ok(false),
                Some(kind) if config.arch.recurrent.is_some_and(|own| own.layer_type() == kind) => Ok(false),
                Some("sliding_attention") if window.is_some() => Ok(true),
                other => {
                    let supported = "full_attention, and sliding_attention with a sliding_window";
                    Err(Unsupported::feature("the layer type", other.unwrap_or("not a string"), supported))
                }
            };
            kinds.iter().map(kind).collect::<std::result::Result<Vec<bool>, _>>()?
        }
    };
    match window.filter(|&window| window < config.max_positions && windowed.contains(&true)) {
        Some(window) => Ok((Some(window), windowed)),
        // The layers stay marked: they may have their own rotary embedding.
        None => Ok((None, windowed)),
    }
}

/// Returns the window of the file or the architecture's default, and the layers that have it if the file has no list.
fn by_rule(fields: &Fields<'_>, config: &ModelConfig) -> Result<(Option<usize>, Vec<bool>)> {
    const KEY: &str = "sliding_window";
    let stated = fields.size(KEY)?;
    // Null means none; absent means the default.
    let or = |default: Option<usize>| if fields.map.contains_key(KEY) { stated } else { default };
    let layers = |has_window: &dyn Fn(usize) -> bool| (0..config.n_layers).map(has_window).collect();
    let switched = fields.flag("use_sliding_window")?;
    match config.arch.window {
        WindowRule::Unsupported => {
            let active = match switched {
                Some(false) => None,
                Some(true) => or(Some(WINDOW_DEFAULT)),
                None => stated,
            };
            match active.filter(|&window| window < config.max_positions) {
                None => Ok((None, layers(&|_| false))),
                Some(window) => {
                    let value = format!("{KEY} = {window}");
                    Err(Unsupported::feature("a sliding window of attention", value, "none in this family")
                        .into())
                }
            }
        }
        WindowRule::All(default) => Ok((or(default), layers(&|_| true))),
        WindowRule::Switched | WindowRule::SwitchedFromLayer if switched != Some(true) => {
            Ok((None, layers(&|_| false)))
        }
        WindowRule::Switched => Ok((or(Some(WINDOW_DEFAULT)), layers(&|_| true))),
        WindowRule::SwitchedFromLayer => {
            let first = fields.size("max_window_layers")?.unwrap_or(FIRST_LAYER_DEFAULT);
            Ok((or(Some(WINDOW_DEFAULT)), layers(&|layer| layer >= first)))
        }
        WindowRule::AllButEvery(default) => {
            let n = fields.size("sliding_window_pattern")?.unwrap_or(default);
            bounded("sliding_window_pattern", n as f64, 1.0, f64::from(u32::MAX))?;
            Ok((or(Some(WINDOW_DEFAULT)), layers(&|layer| !(layer + 1).is_multiple_of(n))))
        }
    }
}
