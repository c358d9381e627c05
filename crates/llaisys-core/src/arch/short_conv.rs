//! The gated short convolution of LFM2 (arXiv:2511.23404): the sizes of a recurrent layer and of its state.

use crate::arch::bounds::bounded;
use crate::arch::delta_net::TAPS;
use crate::arch::row_map::RowMap;
use crate::arch::weight_id::ShortConvWeight;
use crate::error::FormatError;

/// The recurrent layers of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConv {
    /// Channels of the convolution, the width of the model.
    pub channels: usize,
    /// Inputs that an output of the convolution sees, its own included.
    pub n_taps: usize,
}

impl ShortConv {
    /// Checks the kernel size. Errors: it is out of bounds.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        bounded("the kernel size of the short convolution", self.n_taps as f64, TAPS.0, TAPS.1)
    }

    /// Numbers of the state of one layer and sequence: the last inputs of the convolution, `[n_taps - 1, channels]`.
    pub fn state_len(&self) -> usize {
        (self.n_taps - 1) * self.channels
    }

    /// Activations of one row of a layer: both gates, and the input of the convolution.
    pub fn row_width(&self) -> usize {
        3 * self.channels
    }

    /// The shape of a weight of a layer. Channels are as many as the model is wide.
    pub(crate) fn shape(&self, part: ShortConvWeight) -> Vec<usize> {
        let d = self.channels;
        match part {
            ShortConvWeight::In => vec![3 * d, d],
            ShortConvWeight::InputGate | ShortConvWeight::OutputGate | ShortConvWeight::Input => vec![d, d],
            ShortConvWeight::Conv => vec![d, 1, self.n_taps],
            ShortConvWeight::Out => vec![d, d],
        }
    }

    /// Returns the stored weight that contains the rows of a matrix, and where they are in it.
    pub(crate) fn stored(&self, part: ShortConvWeight) -> (ShortConvWeight, RowMap) {
        let in_at = |number: usize| (ShortConvWeight::In, RowMap::from_row(number * self.channels));
        match part {
            ShortConvWeight::InputGate => in_at(0),
            ShortConvWeight::OutputGate => in_at(1),
            ShortConvWeight::Input => in_at(2),
            other => (other, RowMap::from_row(0)),
        }
    }
}
