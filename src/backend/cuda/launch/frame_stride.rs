//! Frames as the kernels address them: slot numbers, counted from a base address in steps of equal size.

use crate::error::{Error, Result};

/// The step is the largest that all distances between the frames are multiples of.
#[derive(Clone, Copy)]
pub struct FrameStride {
    base: u64,
    step: u64,
    /// Slots up to the last frame.
    count: i32,
}

impl FrameStride {
    /// `bytes`: the step where there is one frame only.
    pub fn new(addresses: impl Iterator<Item = u64> + Clone, bytes: u64) -> Result<FrameStride> {
        let (base, last) = (addresses.clone().min().unwrap_or(0), addresses.clone().max().unwrap_or(0));
        let step = addresses.fold(0, |step, address| common_divisor(step, address - base));
        let step = if step == 0 { bytes } else { step };
        match i32::try_from((last - base) / step + 1) {
            Ok(count) => Ok(FrameStride { base, step, count }),
            Err(_) => Err(Error::Internal(format!("frames {} bytes apart in steps of {step}", last - base))),
        }
    }

    pub fn of(&self, address: u64) -> i32 {
        ((address - self.base) / self.step) as i32
    }

    pub fn address(&self) -> u64 {
        self.base
    }

    pub fn bytes(&self) -> i64 {
        self.step as i64
    }

    pub fn count(&self) -> u64 {
        self.count as u64
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_step_by_the_greatest_common_distance() {
        let addresses = [4096, 4096 + 768, 4096 + 1280];
        let slots = FrameStride::new(addresses.into_iter(), 64).unwrap();
        assert_eq!((slots.address(), slots.bytes(), slots.count()), (4096, 256, 6));
        assert_eq!(addresses.map(|address| slots.of(address)), [0, 3, 5]);
        assert_eq!(FrameStride::new([7].into_iter(), 64).unwrap().bytes(), 64);
    }

    #[test]
    fn slots_refuse_more_than_a_kernel_can_count() {
        assert!(FrameStride::new([0, 1 << 40, (1 << 40) + 16].into_iter(), 64).is_err());
    }
}
