//! The kinds of tensors a host may pass, and their element types.

use std::ffi::CStr;

/// What a tensor at the boundary holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorKind {
    Video,
    Latent,
}

impl TensorKind {
    pub const fn c_name(self) -> &'static CStr {
        match self {
            TensorKind::Video => c"video",
            TensorKind::Latent => c"latent",
        }
    }

    pub fn name(self) -> &'static str {
        self.c_name().to_str().expect("it is ASCII")
    }

    /// Accepted element types.
    pub const fn dtypes(self) -> &'static [DType] {
        match self {
            TensorKind::Video => &DType::ALL,
            TensorKind::Latent => &[DType::F16, DType::BF16, DType::F32],
        }
    }
}

/// The element types of the C ABI. The numbers are DLPack's: code, bits, lanes from the lowest byte up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DType {
    U8 = 0x0001_0801,
    U16 = 0x0001_1001,
    F16 = 0x0001_1002,
    BF16 = 0x0001_1004,
    F32 = 0x0001_2002,
}

impl DType {
    pub const ALL: [DType; 5] = [DType::U8, DType::U16, DType::F16, DType::BF16, DType::F32];

    pub fn from_code(code: u32) -> Option<DType> {
        Self::ALL.into_iter().find(|d| *d as u32 == code)
    }

    pub const fn bytes(self) -> u64 {
        match self {
            DType::U8 => 1,
            DType::U16 | DType::F16 | DType::BF16 => 2,
            DType::F32 => 4,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            DType::U8 => "u8",
            DType::U16 => "u16",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
        }
    }

    /// The largest value of an integer type, which stands for full intensity; `None` for floats.
    pub const fn full_scale(self) -> Option<f32> {
        match self {
            DType::U8 => Some(255.0),
            DType::U16 => Some(65535.0),
            DType::F16 | DType::BF16 | DType::F32 => None,
        }
    }
}
