//! Selection of the kernels: the CPU's features are detected once, when a context is created.

use super::isa::{Isa, detect, unsupported};
use crate::error::Unsupported;

pub use super::isa::IsaName;

/// The selected instruction set. A value exists only if the machine has the set.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    isa: Isa,
}

impl Kernels {
    /// Selects the kernels of `isa`, or of the best set that the machine has.
    ///
    /// Errors: [`Unsupported::Isa`] if the machine lacks `isa`.
    pub fn select(isa: Option<IsaName>) -> Result<Self, Unsupported> {
        let name = isa.unwrap_or_else(|| IsaName::available()[0]);
        detect(name).map(|isa| Self { isa }).ok_or_else(|| unsupported(name.name()))
    }

    /// The name of the selected set.
    pub fn isa(&self) -> IsaName {
        self.isa.name()
    }

    /// The selected set with its token, for the ops to match on.
    pub(super) fn proof(&self) -> Isa {
        self.isa
    }
}
