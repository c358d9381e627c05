//! The mixture of experts of a folder's model.

use crate::arch::experts::Experts;
use crate::arch::spec::ArchSpec;
use crate::error::{FormatError, Result};
use crate::load::folder::fields::Fields;
use crate::load::folder::{CONFIG_FILE, options};

/// transformers' default of `num_dense_layers` in LFM2.
const N_DENSE_DEFAULT: usize = 2;

/// Reads the mixture of experts. Errors: a missing key; two numbers of experts.
pub(super) fn read(fields: &Fields<'_>, arch: &ArchSpec) -> Result<Option<Experts>> {
    let Some(keys) = arch.experts else { return Ok(None) };
    let [what, other] = options::EXPERT_COUNT_KEYS;
    let n = match (fields.size(what)?, fields.size(other)?) {
        (Some(got), Some(want)) if got != want => {
            let (got, want) = (got as u64, want as u64);
            return Err(FormatError::Disagree { what, got, other, want }.into());
        }
        (stated, other) => stated.or(other),
    };
    let d_ff = fields.required_size(keys.d_ff)?;
    let softmax = Experts {
        n: n.ok_or(FormatError::KeyMissing { file: CONFIG_FILE, key: keys.n })?,
        n_used: fields.required_size(keys.n_used)?,
        normalize: match keys.normalize {
            Some(key) => fields.flag(key)?.unwrap_or(keys.normalize_default),
            None => true,
        },
        sigmoid: false,
        projection_biases: keys.projection_biases,
        has_bias: false,
        scale: 1.0,
        n_dense: 0,
        d_dense: if arch.gemma4 { fields.required_size(arch.d_ff_key)? } else { d_ff },
    };
    if !keys.sigmoid {
        return Ok(Some(softmax));
    }
    let n_dense = fields.size("num_dense_layers")?.unwrap_or(N_DENSE_DEFAULT);
    Ok(Some(Experts {
        sigmoid: true,
        has_bias: fields.flag("use_expert_bias")?.unwrap_or(true),
        scale: fields.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
        n_dense,
        d_dense: if n_dense > 0 { fields.required_size(arch.d_ff_key)? } else { d_ff },
        ..softmax
    }))
}
