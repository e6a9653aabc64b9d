//! The architecture that kernels are chosen for: that of the GPU, or an older one named by the environment variable
//! `VVAE_ARCH`.

use crate::error::{Error, Result};

/// Names an older architecture, such as "8.6". Read when a device is created.
pub const ARCH_VARIABLE: &str = "VVAE_ARCH";

/// A compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelArch {
    pub major: i32,
    pub minor: i32,
}

impl KernelArch {
    pub const HOPPER: KernelArch = KernelArch::new(9, 0);
    /// What can be asked for, with the most shared memory of a thread block.
    const KNOWN: [(KernelArch, u32); 5] = [
        (KernelArch::new(8, 0), 163 << 10),
        (KernelArch::new(8, 6), 99 << 10),
        (KernelArch::new(8, 9), 99 << 10),
        (KernelArch::HOPPER, 227 << 10),
        (KernelArch::new(12, 0), 99 << 10),
    ];

    pub const fn new(major: i32, minor: i32) -> KernelArch {
        KernelArch { major, minor }
    }

    /// PTX for 9.0a runs on 9.0 alone.
    pub fn has_wgmma(self) -> bool {
        self == KernelArch::HOPPER
    }

    /// The architecture and shared memory to use on a GPU of `own`, if `requested` names one that the GPU can stand in
    /// for.
    pub fn select(requested: &str, own: KernelArch, own_shared_bytes: u32) -> Result<(KernelArch, u32)> {
        let known = KernelArch::KNOWN.into_iter().find(|(arch, _)| arch.to_string() == requested);
        let Some((arch, shared_bytes)) = known else {
            let all = KernelArch::KNOWN.map(|(arch, _)| arch.to_string()).join(", ");
            return Err(Error::Argument(format!(
                "{ARCH_VARIABLE}: \"{requested}\" is none of {all}; use one or unset it"
            )));
        };
        if arch > own || (arch.has_wgmma() && !own.has_wgmma()) {
            return Err(Error::Argument(format!(
                "{ARCH_VARIABLE}: a GPU of compute capability {own} cannot run the kernels of {arch}; use an older one \
                 or unset it"
            )));
        }
        Ok((arch, shared_bytes.min(own_shared_bytes)))
    }
}

impl std::fmt::Display for KernelArch {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn select_takes_older_architectures_with_their_shared_memory() {
        let hopper = KernelArch::new(9, 0);
        assert_eq!(KernelArch::select("8.6", hopper, 227 << 10), Ok((KernelArch::new(8, 6), 99 << 10)));
        assert_eq!(KernelArch::select("8.0", KernelArch::new(8, 6), 99 << 10), Ok((KernelArch::new(8, 0), 99 << 10)));
        assert_eq!(KernelArch::select("9.0", hopper, 227 << 10), Ok((hopper, 227 << 10)));
        assert_eq!(KernelArch::select("8.9", KernelArch::new(12, 0), 99 << 10), Ok((KernelArch::new(8, 9), 99 << 10)));
    }

    #[test]
    fn select_refuses_what_the_gpu_cannot_run() {
        for (requested, own) in [("12.0", (9, 0)), ("9.0", (12, 0)), ("9.0", (8, 6)), ("8.9", (8, 6)), ("7.5", (9, 0))]
        {
            let error = KernelArch::select(requested, KernelArch::new(own.0, own.1), 227 << 10).unwrap_err();
            assert!(error.to_string().contains("VVAE_ARCH") && error.to_string().contains(requested), "{error}");
        }
    }
}
