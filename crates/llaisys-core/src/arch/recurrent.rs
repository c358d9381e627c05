//! The kinds of recurrent layers, of which a model has at most one.

use crate::arch::delta_net::DeltaNet;
use crate::arch::short_conv::ShortConv;
use crate::error::FormatError;

/// The kind of an architecture's recurrent layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentKind {
    /// Gated DeltaNet. The attention layers have a gate of their output.
    DeltaNet,
    /// Gated short convolutions.
    ShortConv,
}

impl RecurrentKind {
    /// Its name in `layer_types` of `config.json`.
    pub(crate) fn layer_type(self) -> &'static str {
        match self {
            Self::DeltaNet => "linear_attention",
            Self::ShortConv => "conv",
        }
    }
}

/// The recurrent layers of a model, which all have the same sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecurrentLayer {
    /// Gated DeltaNet.
    DeltaNet(DeltaNet),
    /// Gated short convolutions.
    ShortConv(ShortConv),
}

impl RecurrentLayer {
    /// Checks every size. Errors: as `check` of the kind.
    pub(crate) fn check(&self) -> Result<(), FormatError> {
        match self {
            Self::DeltaNet(delta_net) => delta_net.check(),
            Self::ShortConv(short_conv) => short_conv.check(),
        }
    }

    /// Numbers (f32) of the state of one layer and sequence.
    pub fn state_len(&self) -> usize {
        match self {
            Self::DeltaNet(delta_net) => delta_net.state_len(),
            Self::ShortConv(short_conv) => short_conv.state_len(),
        }
    }

    /// Numbers (f32) of one row from which the state is computed again.
    pub fn journal_width(&self) -> usize {
        match self {
            Self::DeltaNet(delta_net) => delta_net.channels() + 2 * delta_net.heads.n_values,
            Self::ShortConv(short_conv) => short_conv.channels,
        }
    }

    /// Activations of one row of a layer.
    pub fn row_width(&self) -> usize {
        match self {
            Self::DeltaNet(delta_net) => delta_net.row_width(),
            Self::ShortConv(short_conv) => short_conv.row_width(),
        }
    }

    /// Weights of the convolutions of one layer, which are in f32 in every mode.
    pub(crate) fn taps_len(&self) -> usize {
        match self {
            Self::DeltaNet(delta_net) => delta_net.channels() * delta_net.n_taps,
            Self::ShortConv(short_conv) => short_conv.channels * short_conv.n_taps,
        }
    }
}
