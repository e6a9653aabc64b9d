//! Vector code: the instruction sets, arithmetic on their vectors, and the microkernels.
//! Works on pointers and strides. Must not know frames, operations or threads.

mod microkernel;
mod portable;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use microkernel::{
    BLOCK, DOT_CHANNELS, DOT_PIXELS, MicroTile, Microkernels, OuterProduct, PANEL, dot_tile, panel_count, panel_width,
};
pub(super) use portable::Portable;
pub(super) use vector::{Simd, SimdOp, exp, silu};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

/// Which vectors to compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Instructions {
    /// The widest that the processor has.
    #[default]
    Auto,
    Avx512,
    Avx2,
    Portable,
}

impl Instructions {
    /// Every instruction set that this processor has, the widest first.
    pub fn available() -> Vec<Instructions> {
        let all = [Instructions::Avx512, Instructions::Avx2, Instructions::Portable];
        all.into_iter().filter(|set| set.missing_features().is_empty()).collect()
    }

    /// Features that this set needs and the processor lacks.
    pub(super) fn missing_features(self) -> Vec<&'static str> {
        #[cfg(target_arch = "x86_64")]
        let [avx512f, avx2, fma] = [
            ("AVX-512F", is_x86_feature_detected!("avx512f")),
            ("AVX2", is_x86_feature_detected!("avx2")),
            ("FMA", is_x86_feature_detected!("fma")),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let [avx512f, avx2, fma] = ["AVX-512F", "AVX2", "FMA"].map(|name| (name, false));
        let needs = match self {
            Instructions::Auto | Instructions::Portable => vec![],
            Instructions::Avx2 => vec![avx2, fma],
            Instructions::Avx512 => vec![avx512f, avx2, fma],
        };
        needs.into_iter().filter(|(_, has)| !has).map(|(name, _)| name).collect()
    }
}

/// Runs `$body` with `$simd` as the type of an instruction set that the processor has.
macro_rules! with_simd {
    ($instructions:expr, $simd:ident => $body:expr) => {
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::simd::Instructions::Avx512 => {
                type $simd = $crate::backend::cpu::simd::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::backend::cpu::simd::Instructions::Avx2 => {
                type $simd = $crate::backend::cpu::simd::Avx2;
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
