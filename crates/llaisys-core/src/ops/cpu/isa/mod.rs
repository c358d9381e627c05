//! Instruction sets as proof tokens: a value of [`Avx2`], [`Avx512`] or another token exists only if the CPU has the
//! set. Code that has a token may call the functions compiled for its set without another check.
//!
//! A function for a lower set is compiled without the features of a higher one, because compilers use every feature
//! that is enabled (with VNNI, `vpdpwssd` for a product and a sum).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod lanes;
mod scalar;

use crate::error::Unsupported;
use lanes::{Kernel, Lanes};

/// AVX2 with the features that every `avx2` function is compiled for: avx2, fma, f16c. `#[target_feature]` accepts
/// only literals, so each function repeats the list that [`Avx2::detect`] checks.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    /// Returns the token if the CPU and the system have avx2, fma and f16c.
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// [`Avx2`] and 256-bit `vpdpbusd`.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2Vnni {
    base: Avx2,
    encoding: Encoding,
}

/// The two encodings of 256-bit `vpdpbusd`.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) enum Encoding {
    /// The encoding of AVX2's instructions, in CPUs with AVX-VNNI: avxvnni.
    Vex,
    /// The encoding of AVX-512's instructions, in CPUs with AVX-512: avx512f, avx512vl, avx512vnni.
    Evex,
}

#[cfg(target_arch = "x86_64")]
impl Avx2Vnni {
    /// Returns the token if the CPU and the system have the features of [`Avx2`] and of an encoding.
    pub(crate) fn detect() -> Option<Self> {
        let base = Avx2::detect()?;
        if is_x86_feature_detected!("avxvnni") {
            return Some(Self { base, encoding: Encoding::Vex });
        }
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        has.then_some(Self { base, encoding: Encoding::Evex })
    }

    /// The set without VNNI.
    pub(crate) fn base(self) -> Avx2 {
        self.base
    }

    /// The encoding that the CPU has; VEX if it has both.
    pub(crate) fn encoding(self) -> Encoding {
        self.encoding
    }
}

/// AVX-512: avx512f, avx512bw, avx512vl, avx512dq (and avx2, fma, f16c).
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// Returns the token if the CPU and the system have every feature of the list.
    pub(crate) fn detect() -> Option<Self> {
        let has = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        has.then_some(Self(()))
    }
}

/// [`Avx512`] and avx512vnni.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx512);

#[cfg(target_arch = "x86_64")]
impl Avx512Vnni {
    /// Returns the token if the CPU and the system have every feature of the list.
    pub(crate) fn detect() -> Option<Self> {
        let base = Avx512::detect()?;
        is_x86_feature_detected!("avx512vnni").then_some(Self(base))
    }

    /// The set without VNNI.
    pub(crate) fn base(self) -> Avx512 {
        self.0
    }
}

/// [`Avx512Vnni`] and avx512bf16.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512Vnni);

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    /// Returns the token if the CPU and the system have every feature of the list.
    pub(crate) fn detect() -> Option<Self> {
        let base = Avx512Vnni::detect()?;
        is_x86_feature_detected!("avx512bf16").then_some(Self(base))
    }

    /// The set without BF16.
    pub(crate) fn base(self) -> Avx512Vnni {
        self.0
    }
}

/// The instruction set that an op runs on, with its token; each op matches on it once.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Isa {
    /// Plain loops, on every machine.
    Scalar,
    /// 256-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 256-bit vectors with dot products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(Avx2Vnni),
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// 512-bit vectors with dot products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    /// 512-bit vectors with dot products of bytes and of bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512Bf16),
}

impl Isa {
    /// Its name.
    pub(crate) fn name(self) -> IsaName {
        match self {
            Isa::Scalar => IsaName::Scalar,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => IsaName::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni(_) => IsaName::Avx2Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => IsaName::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni(_) => IsaName::Avx512Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16(_) => IsaName::Avx512Bf16,
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self {
            Isa::Scalar => scalar::Scalar.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(proof) => proof.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni(proof) => proof.base().enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(proof) => proof.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni(proof) => proof.base().enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16(proof) => proof.enter(kernel),
        }
    }
}

/// Returns `isa` with its token, or `None` if the machine lacks the set.
pub(crate) fn detect(isa: IsaName) -> Option<Isa> {
    match isa {
        IsaName::Scalar => Some(Isa::Scalar),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx2 => Avx2::detect().map(Isa::Avx2),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx2Vnni => Avx2Vnni::detect().map(Isa::Avx2Vnni),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx512 => Avx512::detect().map(Isa::Avx512),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx512Vnni => Avx512Vnni::detect().map(Isa::Avx512Vnni),
        #[cfg(target_arch = "x86_64")]
        IsaName::Avx512Bf16 => Avx512Bf16::detect().map(Isa::Avx512Bf16),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    }
}

/// The name of an instruction set, as used in configuration and health reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IsaName {
    /// AVX-512 F, BW, VL, DQ with VNNI and BF16.
    Avx512Bf16,
    /// AVX-512 F, BW, VL, DQ with VNNI.
    Avx512Vnni,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// AVX2 with FMA, F16C and 256-bit VNNI (AVX-VNNI, or AVX-512 VNNI and VL).
    Avx2Vnni,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain loops, on every machine.
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

    /// Parses a name.
    ///
    /// Errors: [`Unsupported::Isa`] for a name that is not in the list.
    pub fn parse(name: &str) -> Result<Self, Unsupported> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| unsupported(name))
    }

    /// The name in configuration: `"avx512_bf16"`, `"avx512_vnni"`, `"avx512"`, `"avx2_vnni"`, `"avx2"` or `"scalar"`.
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

    /// The sets that this machine has, best first; never empty.
    pub fn available() -> Vec<IsaName> {
        Self::ALL.into_iter().filter(|&isa| detect(isa).is_some()).collect()
    }
}

/// The error for a set that does not exist or that this machine lacks; it lists the available ones.
pub(super) fn unsupported(name: &str) -> Unsupported {
    let available: Vec<&str> = IsaName::available().into_iter().map(IsaName::name).collect();
    Unsupported::Isa { name: name.to_owned(), available: available.join(", ") }
}
