//! Proof tokens: a value of [`Avx2`], [`Avx512`] or one of the others exists only where the CPU has the set, so code
//! that holds one may call the functions compiled for it without asking again.
//!
//! A function for a lower set is compiled without the features of a higher one: compilers use what they are allowed to
//! (with VNNI on, `vpdpwssd` for a product and a sum).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod lanes;
mod scalar;

use crate::error::Unsupported;
use lanes::Kernel;

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

/// As [`Avx2`], and `vpdpbusd` of 256 bits.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2Vnni {
    base: Avx2,
    encoding: Encoding,
}

/// The two encodings of `vpdpbusd` of 256 bits.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) enum Encoding {
    /// As AVX2's instructions are, in CPUs with AVX-VNNI: avxvnni.
    Vex,
    /// As those of AVX-512 are, in CPUs with that: avx512f, avx512vl, avx512vnni.
    Evex,
}

#[cfg(target_arch = "x86_64")]
impl Avx2Vnni {
    /// The token, if the CPU and the system have the features of [`Avx2`] and of an encoding.
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

    /// The encoding that the CPU has; VEX of both.
    pub(crate) fn encoding(self) -> Encoding {
        self.encoding
    }
}

/// As [`Avx2`], for: avx512f, avx512bw, avx512vl, avx512dq (and avx2, fma, f16c).
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
            && is_x86_feature_detected!("avx512dq");
        has.then_some(Self(()))
    }
}

/// As [`Avx512`], and avx512vnni.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx512);

#[cfg(target_arch = "x86_64")]
impl Avx512Vnni {
    /// The token, if the CPU and the system have every feature of the list.
    pub(crate) fn detect() -> Option<Self> {
        let base = Avx512::detect()?;
        is_x86_feature_detected!("avx512vnni").then_some(Self(base))
    }

    /// The set without VNNI.
    pub(crate) fn base(self) -> Avx512 {
        self.0
    }
}

/// As [`Avx512Vnni`], and avx512bf16.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512Bf16(Avx512Vnni);

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    /// The token, if the CPU and the system have every feature of the list.
    pub(crate) fn detect() -> Option<Self> {
        let base = Avx512Vnni::detect()?;
        is_x86_feature_detected!("avx512bf16").then_some(Self(base))
    }

    /// The set without BF16.
    pub(crate) fn base(self) -> Avx512Vnni {
        self.0
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
    /// 256-bit, with sums of products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(Avx2Vnni),
    /// 512-bit.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// 512-bit, with sums of products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    /// 512-bit, with sums of products of bytes and of bf16.
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
            Isa::Scalar => kernel.run(scalar::Scalar),
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

/// `isa` with its proof, or `None` if the machine lacks it.
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
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| unsupported(name))
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

/// The error for an instruction set that this machine lacks or that does not exist, with the available ones.
pub(super) fn unsupported(name: &str) -> Unsupported {
    let available: Vec<&str> = IsaName::available().into_iter().map(IsaName::name).collect();
    Unsupported::Isa { name: name.to_owned(), available: available.join(", ") }
}
