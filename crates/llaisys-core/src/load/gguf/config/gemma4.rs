//! The keys of a GGUF file that only Gemma 4 has, as llama.cpp's converter writes them (`conversion/gemma.py`).

use super::{Keys, WINDOWED_KEY, listed_layers, required};
use crate::arch::bounds::bounded;
use crate::arch::gemma4::{Gemma4, Placeholders};
use crate::arch::spec::{ArchSpec, LayerWeight, WeightId};
use crate::error::{Result, Unsupported};
use crate::load::gguf::Header;
use crate::ops::KvHeads;

const KV_HEADS: &str = "attention.head_count_kv";
const D_FF: &str = "feed_forward_length";
const N_SHARED: &str = "attention.shared_kv_layers";

/// The sizes of a Gemma 4 model, of which other architectures have one for all layers or do not have them.
pub(super) struct Sizes {
    /// Heads of the layers with a window.
    pub window_heads: KvHeads,
    /// Width of the dense feed-forward blocks, where they are not twice as wide.
    pub d_ff: usize,
    pub gemma4: Gemma4,
}

/// Reads the sizes; None for other architectures.
///
/// Errors: a missing key; a list of another length than the number of layers; sizes that differ between layers of one kind.
pub(super) fn read(
    keys: &Keys<'_>,
    header: &Header<'_>,
    arch: &ArchSpec,
    n_layers: usize,
) -> Result<Option<Sizes>> {
    if !arch.gemma4 {
        return Ok(None);
    }
    // Also bounds the number of layers.
    let windowed = required(listed_layers(keys, n_layers)?, &keys.full(WINDOWED_KEY))?;
    let n_shared = keys.size(N_SHARED)?.unwrap_or(0);
    bounded(N_SHARED, n_shared as f64, 0.0, n_layers as f64 - 1.0)?;
    let kv_heads = keys.sizes(KV_HEADS, n_layers)?;
    let of_kind = |kind: bool| {
        let sizes = kv_heads.iter().zip(&windowed).filter(|&(_, &is_windowed)| is_windowed == kind);
        one_size(keys, KV_HEADS, sizes.map(|(&size, _)| size))
    };
    let (in_window, in_full) = (of_kind(true)?, of_kind(false)?);
    let d_head_full = rotated_width(keys, "")?;
    let window_heads =
        KvHeads { n_kv_heads: in_window.or(in_full).unwrap_or(0), d_head: rotated_width(keys, "_swa")? };
    let (d_ff, widens_shared) = d_ff(keys, n_layers, n_shared)?;
    let gemma4 = Gemma4 {
        full_heads: KvHeads { n_kv_heads: in_full.or(in_window).unwrap_or(0), d_head: d_head_full },
        values_are_keys: !has_full_values(header, arch, &windowed),
        n_shared,
        widens_shared,
        d_input: keys.required_size("embedding_length_per_layer_input")?,
        // A file has no keys for them.
        placeholders: Placeholders::default(),
    };
    Ok(Some(Sizes { window_heads, d_ff, gemma4 }))
}

/// Returns whether the first layer without a window has a projection of values.
fn has_full_values(header: &Header<'_>, arch: &ArchSpec, windowed: &[bool]) -> bool {
    let first = windowed.iter().position(|&is_windowed| !is_windowed);
    let name = first.and_then(|layer| arch.gguf_names.name(WeightId::Layer(layer, LayerWeight::V)));
    header.tensor_names().any(|tensor| Some(tensor) == name.as_deref())
}

/// Reads the width of heads, of which all elements are rotated. `suffix`: of the layers with a window.
fn rotated_width(keys: &Keys<'_>, suffix: &str) -> Result<usize> {
    let width = |key: &str| keys.required_size(&format!("{key}{suffix}"));
    let d_head = width("attention.key_length")?;
    for key in ["attention.value_length", "rope.dimension_count"] {
        let other = width(key)?;
        if other != d_head {
            let what = format!("{}{suffix} = {other}", keys.full(key));
            let supported = "heads of one width, which are rotated whole";
            return Err(Unsupported::feature("the key", what, supported).into());
        }
    }
    Ok(d_head)
}

/// Reads the width of the dense blocks, and whether the last `n_shared` of them, fewer than all, are twice as wide.
fn d_ff(keys: &Keys<'_>, n_layers: usize, n_shared: usize) -> Result<(usize, bool)> {
    let sizes = keys.sizes(D_FF, n_layers)?;
    let (own, shared) = sizes.split_at(n_layers - n_shared);
    let own = one_size(keys, D_FF, own.iter().copied())?.unwrap_or(0);
    let shared = one_size(keys, D_FF, shared.iter().copied())?.unwrap_or(own);
    match shared {
        _ if shared == own => Ok((own, false)),
        _ if shared == own.saturating_mul(2) => Ok((own, true)),
        _ => Err(differing(keys, D_FF).into()),
    }
}

/// Returns the size that all layers of a kind have; None if there are no layers.
fn one_size(keys: &Keys<'_>, key: &str, mut sizes: impl Iterator<Item = usize>) -> Result<Option<usize>> {
    let first = sizes.next();
    if sizes.any(|size| Some(size) != first) {
        return Err(differing(keys, key).into());
    }
    Ok(first)
}

fn differing(keys: &Keys<'_>, key: &str) -> Unsupported {
    Unsupported::feature("a size for each layer", keys.full(key), "one size for all layers of a kind")
}
