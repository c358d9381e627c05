//! Settings of FP8 checkpoints: `quant_method` "fp8", as transformers, DeepSeek, Qwen and Mistral write them.
//!
//! `modules_to_not_convert` needs no attention: such matrices are stored in a plain type. So is `activation_scheme`:
//! it concerns only the rounding of activations.

use super::scaled::{Numbers, Scheme, Strategy};
use crate::error::{FormatError, Result, Unsupported};
use crate::load::folder::fields::Fields;
use crate::quant::BLOCK_LEN;
use serde_json::Value;

/// Reads the settings. Errors: numbers other than E4M3, blocks whose columns are not a multiple of 32.
pub(super) fn read(config: &Fields<'_>) -> Result<Scheme> {
    if let Some(other) = config.text("fmt")?.filter(|&format| format != "e4m3") {
        return Err(Unsupported::feature("FP8 numbers", other, "e4m3").into());
    }
    let strategy = match config.list("weight_block_size")? {
        Some(sizes) => block(config, "weight_block_size", sizes)?,
        None => Strategy::MatrixOrRow,
    };
    Ok(Scheme { numbers: Numbers::Fp8, strategy, has_zeros: false })
}

/// Returns the blocks that a list of two sizes states. Errors: not two whole numbers from 1; columns that are not a
/// multiple of 32.
pub(super) fn block(config: &Fields<'_>, key: &'static str, sizes: &[Value]) -> Result<Strategy> {
    let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0);
    let &[Some(n_rows), Some(n_columns)] = &sizes.iter().map(size).collect::<Vec<_>>()[..] else {
        let expected = "a list of two whole numbers from 1";
        return Err(FormatError::KeyType { file: config.file, key, expected }.into());
    };
    columns(key, n_columns)?;
    Ok(Strategy::Block { n_rows, n_columns })
}

/// Checks the number of inputs that share a scale. Errors: it is not a multiple of 32.
pub(super) fn columns(key: &'static str, n: usize) -> Result<(), Unsupported> {
    if n > 0 && n.is_multiple_of(BLOCK_LEN) {
        return Ok(());
    }
    Err(Unsupported::feature(key, n, "multiples of 32 inputs"))
}
