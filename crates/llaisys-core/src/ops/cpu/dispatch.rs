//! Which kernels run: asked of the machine once, when a context is created.

use super::isa::{Isa, detect, unsupported};
use crate::error::Unsupported;

pub use super::isa::IsaName;

/// The chosen instruction set, with the proof that the machine has it.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    isa: Isa,
}

impl Kernels {
    /// The kernels of `isa`, or of the best set that the machine has.
    ///
    /// Errors: [`Unsupported::Isa`] if the machine lacks the asked set.
    pub fn select(isa: Option<IsaName>) -> Result<Self, Unsupported> {
        let name = isa.unwrap_or_else(|| IsaName::available()[0]);
        detect(name).map(|isa| Self { isa }).ok_or_else(|| unsupported(name.name()))
    }

    /// The chosen set.
    pub fn isa(&self) -> IsaName {
        self.isa.name()
    }

    /// The chosen set as the ops match on it.
    pub(super) fn proof(&self) -> Isa {
        self.isa
    }
}
