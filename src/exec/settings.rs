//! What a host can set, as typed values. The node table parses into this.

use std::path::PathBuf;

use crate::backend::Precision;
use crate::backend::cpu::Instructions;
use crate::ir::{CacheFormat, GivenRates};
use crate::report::Trace;

/// The least memory that is left to other programs if the host sets no limit, such as for a desktop.
const MARGIN: u64 = 256 << 20;
pub const HOST_MARGIN: u64 = 1 << 30;

/// How much memory a job may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// What is free, less a margin for other programs.
    Auto,
    Bytes(u64),
    /// Of what is free.
    Percent(u64),
}

impl Limit {
    /// In bytes, of `free` bytes. `Auto` leaves `margin` or a sixteenth, whichever is more.
    pub fn bytes(self, free: u64, margin: u64) -> u64 {
        match self {
            Limit::Bytes(bytes) => bytes,
            Limit::Percent(percent) => (u128::from(free) * u128::from(percent) / 100) as u64,
            Limit::Auto => free.saturating_sub(margin.max(free / 16)),
        }
    }
}

/// The range of floating-point pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PixelRange {
    /// -1 to 1, as the model has it.
    Signed,
    /// 0 to 1.
    Unit,
}

/// Which latents the host's tensors have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Latents {
    /// As the network gives and takes them.
    Raw,
    /// As the diffusion model gives and takes them.
    Model,
}

/// What encode writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Latent {
    Mean,
    Sample,
}

/// What a call does about values that are NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnNonFinite {
    /// Computes with them: the output frames that depend on them are not finite either.
    Propagate,
    Fail,
}

/// Tiles asked for by the host. Sizes in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    pub enabled: bool,
    pub size: u64,
    pub overlap: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// One for each device, or one for all.
    pub memory_limit: Vec<Limit>,
    /// Whether devices may work together that do not give the same bits.
    pub mixed_devices: bool,
    /// Of host memory beside the device's.
    pub host_memory_limit: Limit,
    /// `None`: all cores.
    pub threads: Option<u64>,
    pub instructions: Instructions,
    /// `None`: fp16 on a GPU, fp32 on the CPU.
    pub precision: Option<Precision>,
    pub pixel_range: PixelRange,
    /// Multiplies latents on the way out of encode, divides them on the way into decode.
    pub scaling_factor: f32,
    pub latents: Latents,
    /// The published model whose latents they are; `None`: as the checkpoint says.
    pub latent_format: Option<&'static str>,
    pub posterior: Latent,
    pub seed: u64,
    pub cache: CacheFormat,
    /// Whether tiles may be used at all. Without them a job that does not fit whole fails.
    pub allow_tiles: bool,
    /// By direction.
    pub tiling: [Tiling; 2],
    /// Latent frames per slice; `None`: by plan.
    pub slice_frames: Option<u64>,
    /// The most frames that any stage computes at a time; `None`: by plan.
    pub chunk_frames: Option<u64>,
    pub on_nonfinite: OnNonFinite,
    /// The card that is only planned for; `None`: the session's own devices.
    pub device_like: Option<&'static str>,
    /// What plans are compared by. Rates that are not given are the device's.
    pub rates: GivenRates,
    /// Whether rates of a GPU are measured once and kept in a table.
    pub autotune: bool,
    /// Where that is; `None`: beside the driver's cache.
    pub autotune_path: Option<PathBuf>,
    /// Where the times of operations are written.
    pub trace: Option<Trace>,
}

impl Settings {
    /// The precision to begin with on a GPU.
    pub fn on_gpu(&self) -> Precision {
        self.precision.unwrap_or(Precision::Fp16)
    }

    /// What one device's job may take, of `free` bytes.
    pub fn device_bytes(&self, free: u64) -> u64 {
        self.memory_limit.first().map_or(free, |limit| limit.bytes(free, MARGIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_bytes_of_what_is_free() {
        assert_eq!(Limit::Bytes(7).bytes(100, 10), 7, "what a host asks for is not looked at twice");
        assert_eq!(Limit::Percent(80).bytes(1000, 10), 800);
        assert_eq!(Limit::Percent(100).bytes(u64::MAX, 10), u64::MAX);
        assert_eq!(Limit::Auto.bytes(1000, 100), 900, "the margin");
        assert_eq!(Limit::Auto.bytes(16_000, 100), 15_000, "or a sixteenth, if that is more");
        assert_eq!(Limit::Auto.bytes(50, 100), 0);
    }
}
