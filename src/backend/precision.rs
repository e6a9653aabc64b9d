//! What a backend computes in.

/// The type that activations and weights are kept in. Sums and statistics are f32 whatever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    Fp16,
    Bf16,
    Fp32,
}

impl Precision {
    pub const ALL: [Precision; 3] = [Precision::Fp16, Precision::Bf16, Precision::Fp32];

    /// As the parameter `precision` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::Fp16 => "fp16",
            Precision::Bf16 => "bf16",
            Precision::Fp32 => "fp32",
        }
    }

    /// Bytes of an activation, and of a weight.
    pub const fn bytes(self) -> u64 {
        match self {
            Precision::Fp16 | Precision::Bf16 => 2,
            Precision::Fp32 => 4,
        }
    }
}
