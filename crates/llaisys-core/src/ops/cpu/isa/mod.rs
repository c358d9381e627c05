//! Proof tokens: a value of [`Avx2`] or [`Avx512`] exists only where the CPU has the set, so code that holds
//! one may call the functions compiled for it without asking again.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod lanes;
mod scalar;

use crate::ops::dispatch::IsaName;

/// The features that every `avx2` function is compiled for; `#[target_feature]` takes only literals, so the
/// attribute is repeated and [`Avx2::detect`] asks for the same list: avx2, fma, f16c.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// The token, if the CPU and the system have avx2, fma and f16c.
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// As [`Avx2`], for: avx512f, avx512bw, avx512vl, avx512dq, avx512bf16, avx512vnni (and avx2, fma, f16c). A
/// CPU without BF16 or VNNI runs the AVX2 kernels.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// The token, if the CPU and the system have every feature of the list.
    pub(crate) fn detect() -> Option<Self> {
        let has = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vnni");
        has.then_some(Self(()))
    }
}

/// The set that an op runs on; each op matches on it once.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Isa {
    /// Plain loops.
    Scalar,
    /// 256-bit.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 512-bit.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Isa {
    /// Its name.
    pub(crate) fn name(self) -> IsaName {
        match self {
            Isa::Scalar => IsaName::Scalar,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => IsaName::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => IsaName::Avx512,
        }
    }
}

/// `isa` with its proof, or `None` if the machine lacks it.
pub(crate) fn detect(isa: IsaName) -> Option<Isa> {
    match isa {
        IsaName::Scalar => Some(Isa::Scalar),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx2 => Avx2::detect().map(Isa::Avx2),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx512 => Avx512::detect().map(Isa::Avx512),
        #[cfg(not(target_arch = "x86_64"))]
        IsaName::Avx2 | IsaName::Avx512 => None,
    }
}
