//! Which kernels run: asked of the machine once, when a context is created.

use super::cpu::isa::{Isa, detect};
use crate::error::Unsupported;

/// An instruction set by name, as configuration and health reports spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IsaName {
    /// AVX-512 F, BW, VL, DQ with VNNI and BF16.
    Avx512Bf16,
    /// AVX-512 F, BW, VL, DQ with VNNI.
    Avx512Vnni,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// AVX2 with FMA, F16C and VNNI of 256 bits (AVX-VNNI, or AVX-512 VNNI and VL).
    Avx2Vnni,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain loops; everywhere.
    Scalar,
}

impl IsaName {
    /// Every set, best first.
    pub const ALL: [IsaName; 6] = [
        IsaName::Avx512Bf16,
        IsaName::Avx512Vnni,
        IsaName::Avx512,
        IsaName::Avx2Vnni,
        IsaName::Avx2,
        IsaName::Scalar,
    ];

    /// The set spelled `name`.
    ///
    /// Errors: [`Unsupported::Isa`] for a name that is not in the list.
    pub fn parse(name: &str) -> Result<Self, Unsupported> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| refused(name))
    }

    /// As configuration spells it: `"avx512_bf16"`, `"avx512_vnni"`, `"avx512"`, `"avx2_vnni"`, `"avx2"` or `"scalar"`.
    pub const fn name(self) -> &'static str {
        match self {
            IsaName::Avx512Bf16 => "avx512_bf16",
            IsaName::Avx512Vnni => "avx512_vnni",
            IsaName::Avx512 => "avx512",
            IsaName::Avx2Vnni => "avx2_vnni",
            IsaName::Avx2 => "avx2",
            IsaName::Scalar => "scalar",
        }
    }

    /// The sets that this machine runs, best first; never empty.
    pub fn available() -> Vec<IsaName> {
        Self::ALL.into_iter().filter(|&isa| detect(isa).is_some()).collect()
    }
}

fn refused(name: &str) -> Unsupported {
    let available: Vec<&str> = IsaName::available().into_iter().map(IsaName::name).collect();
    Unsupported::Isa { name: name.to_owned(), available: available.join(", ") }
}

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
        detect(name).map(|isa| Self { isa }).ok_or_else(|| refused(name.name()))
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
