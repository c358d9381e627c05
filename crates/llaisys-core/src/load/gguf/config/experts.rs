//! The mixture of experts of a GGUF file.

use super::Keys;
use crate::arch::experts::Experts;
use crate::arch::spec::ArchSpec;
use crate::error::{Result, Unsupported};

/// Reads the mixture of `n` experts of width `d_ff`; None if there are none. `d_dense`: width of the dense block next to
/// them, where there is one. Errors: routing that the architecture does not have.
pub(super) fn read(
    keys: &Keys<'_>,
    arch: &ArchSpec,
    n: usize,
    d_ff: usize,
    d_dense: Option<usize>,
) -> Result<Option<Experts>> {
    if n == 0 {
        return Ok(None);
    }
    let is_sigmoid = arch.experts.is_some_and(|experts| experts.sigmoid);
    if !is_sigmoid {
        keys.expect_neutral("expert_weights_scale", &[0.0, 1.0])?;
    }
    let n_shared = usize::from(arch.shared_expert);
    if let Some(shared) = keys.size("expert_shared_count")?.filter(|&shared| shared > n_shared) {
        let supported = if arch.shared_expert { "1" } else { "none" };
        return Err(Unsupported::feature("shared experts", shared, supported).into());
    }
    let projection_biases = arch.experts.is_some_and(|experts| experts.projection_biases);
    // 0 is unset, 1 is softmax, 2 are sigmoids, 3 is the softmax of the chosen ones, which equals 1 with a sum of 1.
    let (gating, supported) = match (is_sigmoid, projection_biases) {
        (true, _) => (2, "2 (sigmoid)"),
        (_, true) => (3, "3 (softmax of the chosen experts)"),
        _ => (1, "1 (softmax)"),
    };
    if let Some(other) = keys.size("expert_gating_func")?.filter(|&stated| stated > 0 && stated != gating) {
        return Err(Unsupported::feature("expert_gating_func", other, supported).into());
    }
    let n_dense = keys.size("leading_dense_block_count")?.unwrap_or(0);
    if n_dense > 0 && !is_sigmoid {
        let supported = "0 (experts in every layer)";
        return Err(Unsupported::feature("leading_dense_block_count", n_dense, supported).into());
    }
    Ok(Some(Experts {
        n,
        n_used: keys.required_size("expert_used_count")?,
        normalize: keys.metadata.bool(&keys.full("expert_weights_norm"))?.unwrap_or(true),
        sigmoid: is_sigmoid,
        has_bias: is_sigmoid,
        projection_biases,
        scale: keys.multiplier("expert_weights_scale")?,
        n_dense,
        d_dense: match d_dense {
            Some(d_dense) => d_dense,
            None if n_dense > 0 => keys.required_size("feed_forward_length")?,
            None => d_ff,
        },
    }))
}
