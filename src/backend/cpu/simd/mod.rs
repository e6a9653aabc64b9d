//! Vector code: the instruction sets, arithmetic on their vectors, and the microkernels.
//! Works on pointers and strides. Must not know frames, operations or threads.

#[cfg(target_arch = "x86_64")]
mod amx;
mod bf16;
mod microkernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::backend::Precision;

pub(super) use bf16::{AHEAD, Bf16Kernels, BlockProduct, MOST_TILES, TILE, WEIGHT_TILE};
pub(super) use microkernel::{
    BLOCK, DOT_CHANNELS, DOT_PIXELS, MicroTile, Microkernels, OuterProduct, dot_tile, panel_count, panel_width,
};
#[cfg(target_arch = "aarch64")]
pub(super) use neon::{Neon, NeonBf16};
pub(super) use portable::Portable;
pub(super) use vector::{PANEL, Simd, SimdOp, exp, rough_silu, silu};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Amx, Avx2, Avx512, Avx512Bf16};

/// Which instructions to compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Instructions {
    /// The fastest that the processor has for the precision.
    #[default]
    Auto,
    /// Tiles of bf16, beside AVX-512.
    Amx,
    /// AVX-512 with products of bf16.
    Avx512Bf16,
    Avx512,
    Avx2,
    /// NEON with products of bf16.
    NeonBf16,
    Neon,
    Portable,
}

impl Instructions {
    /// Every instruction set that this processor has for a precision, the fastest first.
    pub fn available(precision: Precision) -> Vec<Instructions> {
        use Instructions::{Amx, Avx2, Avx512, Avx512Bf16, Neon, NeonBf16, Portable};
        let all = [Amx, Avx512Bf16, Avx512, Avx2, NeonBf16, Neon, Portable];
        let usable = |set: &Instructions| set.computes(precision) && set.missing_features().is_empty();
        all.into_iter().filter(usable).collect()
    }

    /// Whether the set has kernels for a precision. All others are sets for either.
    pub(super) fn computes(self, precision: Precision) -> bool {
        use Instructions::{Amx, Avx512Bf16, NeonBf16};
        precision == Precision::Bf16 || !matches!(self, Amx | Avx512Bf16 | NeonBf16)
    }

    /// Features that this set needs and the processor lacks.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn missing_features(self) -> Vec<&'static str> {
        let avx2 = [("AVX2", is_x86_feature_detected!("avx2")), ("FMA", is_x86_feature_detected!("fma"))];
        let avx512 = [("AVX-512F", is_x86_feature_detected!("avx512f"))];
        let bf16 = [
            ("AVX-512BW", is_x86_feature_detected!("avx512bw")),
            ("AVX-512DQ", is_x86_feature_detected!("avx512dq")),
            ("AVX-512VL", is_x86_feature_detected!("avx512vl")),
            ("AVX512-BF16", is_x86_feature_detected!("avx512bf16")),
        ];
        let tiles = || vec![("AMX-BF16, or the system's permission to use it", amx::is_available())];
        let needs: Vec<(&'static str, bool)> = match self {
            Instructions::Auto | Instructions::Portable => vec![],
            Instructions::Neon | Instructions::NeonBf16 => vec![("the instructions of aarch64", false)],
            Instructions::Avx2 => avx2.to_vec(),
            Instructions::Avx512 => [&avx2[..], &avx512].concat(),
            Instructions::Avx512Bf16 => [&avx2[..], &avx512, &bf16].concat(),
            Instructions::Amx => [&avx2[..], &avx512, &bf16, &tiles()].concat(),
        };
        needs.into_iter().filter(|(_, has)| !has).map(|(name, _)| name).collect()
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn missing_features(self) -> Vec<&'static str> {
        #[cfg(target_arch = "aarch64")]
        match self {
            Instructions::Neon => return vec![],
            Instructions::NeonBf16 if std::arch::is_aarch64_feature_detected!("bf16") => return vec![],
            Instructions::NeonBf16 => return vec!["BF16"],
            _ => {}
        }
        match self {
            Instructions::Auto | Instructions::Portable => vec![],
            Instructions::Neon | Instructions::NeonBf16 => vec!["the instructions of aarch64"],
            _ => vec!["the instructions of x86-64"],
        }
    }
}

/// Whether the processor has AMX and the system does not let this process use it.
pub(super) fn lacks_permission() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx::has_tiles() && cfg!(target_os = "linux") && !amx::is_available();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Runs `$body` with `$simd` as the type of an instruction set that the processor has. It computes in f32.
macro_rules! with_simd {
    ($instructions:expr, $simd:ident => $body:expr) => {
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::simd::Instructions::Amx
            | $crate::backend::cpu::simd::Instructions::Avx512Bf16
            | $crate::backend::cpu::simd::Instructions::Avx512 => {
                type $simd = $crate::backend::cpu::simd::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::simd::Instructions::Avx2 => {
                type $simd = $crate::backend::cpu::simd::Avx2;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::backend::cpu::simd::Instructions::NeonBf16 | $crate::backend::cpu::simd::Instructions::Neon => {
                type $simd = $crate::backend::cpu::simd::Neon;
                $body
            }
            _ => {
                type $simd = $crate::backend::cpu::simd::Portable;
                $body
            }
        }
    };
}
pub(super) use with_simd;

/// As [`with_simd`], with the products of bf16 that the set has.
macro_rules! with_bf16_simd {
    ($instructions:expr, $simd:ident => $body:expr) => {
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::simd::Instructions::Amx => {
                type $simd = $crate::backend::cpu::simd::Amx;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::simd::Instructions::Avx512Bf16 => {
                type $simd = $crate::backend::cpu::simd::Avx512Bf16;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::backend::cpu::simd::Instructions::NeonBf16 => {
                type $simd = $crate::backend::cpu::simd::NeonBf16;
                $body
            }
            set => $crate::backend::cpu::simd::with_simd!(set, $simd => $body),
        }
    };
}
pub(super) use with_bf16_simd;
