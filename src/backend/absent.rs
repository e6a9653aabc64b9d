//! A device that is not here, as planning needs it. Computes nothing.

use super::{DeviceFacts, Precision};
use crate::error::{Error, Result};
use crate::ir::{ConvLayout, DeviceProfile, Sizes};

pub struct AbsentDevice {
    /// One of [`AbsentDevice::KEYS`].
    pub key: &'static str,
    /// For people.
    pub name: &'static str,
    pub precision: Precision,
    pub arithmetic: String,
    pub profile: DeviceProfile,
    pub sizes: Box<dyn Sizes>,
    pub memory_bytes: u64,
    /// That of [`DeviceFacts`], which the device's kernels decide.
    pub check_layers: fn(Precision, &[ConvLayout], &[u64]) -> Result<()>,
}

impl AbsentDevice {
    pub const KEYS: [&str; 6] = ["rtx3060", "rtx4070", "rtx4090", "rtx5090", "a100", "h200"];

    #[cfg(feature = "cuda")]
    pub fn new(key: &str, precision: Precision) -> Result<AbsentDevice> {
        let card = super::cuda::card(key, precision);
        card.ok_or_else(|| Error::Internal(format!("{key} is accepted, but is no card")))
    }

    #[cfg(not(feature = "cuda"))]
    pub fn new(key: &str, _: Precision) -> Result<AbsentDevice> {
        Err(Error::Device(format!("device_like: {key} is a GPU, and this library was built without CUDA; use none")))
    }
}

impl DeviceFacts for AbsentDevice {
    const HOST_MEMORY: bool = false;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn arithmetic(&self) -> String {
        self.arithmetic.clone()
    }

    fn profile(&self) -> DeviceProfile {
        self.profile
    }

    fn sizes(&self) -> &dyn Sizes {
        &*self.sizes
    }

    fn check_layers(&self, layouts: &[ConvLayout], attention: &[u64]) -> Result<()> {
        (self.check_layers)(self.precision, layouts, attention)
    }

    fn free_bytes(&self) -> u64 {
        self.memory_bytes
    }
}
