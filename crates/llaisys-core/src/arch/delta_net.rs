//! Gated DeltaNet (arXiv:2412.06464): the sizes of a recurrent layer and of its state.

use crate::arch::bounds::bounded;
use crate::arch::row_map::RowMap;
use crate::arch::weight_id::DeltaWeight;
use crate::error::FormatError;
use crate::ops::DeltaHeads;

/// The recurrent layers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNet {
    /// Heads and their widths.
    pub heads: DeltaHeads,
    /// Inputs that an output of the short convolution sees, its own included.
    pub n_taps: usize,
}

const HEADS: (f64, f64) = (1.0, 1024.0);
/// Of a key or value head; the upper bound is that of attention heads.
const WIDTH: (f64, f64) = (1.0, 256.0);
/// Of a short convolution.
pub(crate) const TAPS: (f64, f64) = (2.0, 16.0);

impl DeltaNet {
    /// Checks every value. Errors: one is out of bounds, or the value heads are not divisible among the key heads.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        let DeltaHeads { n_keys, n_values, d_key, d_value, .. } = self.heads;
        for (what, got, (min, max)) in [
            ("the number of linear key heads", n_keys, HEADS),
            ("the number of linear value heads", n_values, HEADS),
            ("the width of linear key heads", d_key, WIDTH),
            ("the width of linear value heads", d_value, WIDTH),
            ("the kernel size of the short convolution", self.n_taps, TAPS),
        ] {
            bounded(what, got as f64, min, max)?;
        }
        if n_values.is_multiple_of(n_keys) {
            return Ok(());
        }
        let (what, of) = ("the number of linear value heads", "the number of linear key heads");
        Err(FormatError::NotAMultiple { what, got: n_values, of, divisor: n_keys })
    }

    /// Channels of the short convolution: queries, keys, then values.
    pub fn channels(&self) -> usize {
        2 * self.heads.key_width() + self.heads.value_width()
    }

    /// Numbers of the window of the short convolution of one layer and sequence, `[n_taps - 1, channels]`.
    pub fn window_len(&self) -> usize {
        (self.n_taps - 1) * self.channels()
    }

    /// Numbers of the state of one layer and sequence: the window, then a matrix `[d_key, d_value]` for each value head.
    pub fn state_len(&self) -> usize {
        self.window_len() + self.heads.matrices_len()
    }

    /// Activations of one row of a layer: inputs and outputs of the short convolutions, the gate and the result, and a
    /// strength and a decay for each value head.
    pub fn row_width(&self) -> usize {
        2 * (self.channels() + self.heads.value_width() + self.heads.n_values)
    }

    /// The shape of a weight of a layer, for a model of width `d_model`.
    pub(crate) fn shape(&self, part: DeltaWeight, d_model: usize) -> Vec<usize> {
        let (keys, values) = (self.heads.key_width(), self.heads.value_width());
        let n_values = self.heads.n_values;
        match part {
            DeltaWeight::Qkv => vec![self.channels(), d_model],
            DeltaWeight::Qkvz => vec![self.channels() + values, d_model],
            DeltaWeight::Ba => vec![2 * n_values, d_model],
            DeltaWeight::Q | DeltaWeight::K => vec![keys, d_model],
            DeltaWeight::V | DeltaWeight::Z => vec![values, d_model],
            DeltaWeight::B | DeltaWeight::A => vec![n_values, d_model],
            DeltaWeight::Conv => vec![self.channels(), 1, self.n_taps],
            DeltaWeight::ALog | DeltaWeight::MinusRate | DeltaWeight::DtBias => vec![n_values],
            DeltaWeight::Norm => vec![self.heads.d_value],
            DeltaWeight::Out => vec![d_model, values],
        }
    }

    /// The rows of a part in a fused weight: `Qkv` has one part after the other, `Qkvz` and `Ba` have the parts of the
    /// first key head and its value heads, then those of the second one, and so on.
    pub(crate) fn rows_in(&self, fused: DeltaWeight, part: DeltaWeight) -> RowMap {
        let DeltaHeads { n_keys, n_values, d_key, d_value, .. } = self.heads;
        let of_key = n_values / n_keys;
        let (keys, values) = (self.heads.key_width(), of_key * d_value);
        match (fused, part) {
            (DeltaWeight::Qkv, DeltaWeight::K) => RowMap::from_row(keys),
            (DeltaWeight::Qkv, DeltaWeight::V) => RowMap::from_row(2 * keys),
            (DeltaWeight::Qkvz, part) => {
                let stride = 2 * d_key + 2 * values;
                match part {
                    DeltaWeight::K => RowMap::groups(d_key, d_key, stride),
                    DeltaWeight::V => RowMap::groups(2 * d_key, values, stride),
                    DeltaWeight::Z => RowMap::groups(2 * d_key + values, values, stride),
                    _ => RowMap::groups(0, d_key, stride),
                }
            }
            (DeltaWeight::Ba, DeltaWeight::A) => RowMap::groups(of_key, of_key, 2 * of_key),
            (DeltaWeight::Ba, _) => RowMap::groups(0, of_key, 2 * of_key),
            _ => RowMap::from_row(0),
        }
    }
}
