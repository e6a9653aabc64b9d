//! The floating-point mode of a thread: rounding, and what becomes of denormals. Bits depend on it.

/// Sets the default mode, and restores the earlier one when dropped.
pub struct DefaultMode(u32);

impl DefaultMode {
    pub fn enter() -> DefaultMode {
        let before = DefaultMode(mode::get());
        set_default();
        before
    }
}

impl Drop for DefaultMode {
    fn drop(&mut self) {
        mode::set(self.0);
    }
}

/// For threads of the library, which inherit the mode of the thread that starts them.
pub fn set_default() {
    mode::set(mode::DEFAULT);
}

#[cfg(target_arch = "x86_64")]
mod mode {
    use std::arch::asm;

    /// MXCSR: rounds to nearest, keeps denormals, masks exceptions.
    pub const DEFAULT: u32 = 0x1f80;

    pub fn get() -> u32 {
        let mut mode = 0;
        // SAFETY: writes the number.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
        mode
    }

    pub fn set(mode: u32) {
        // SAFETY: the default, which Rust assumes, or what the host had.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
    }
}

/// Not done on other processors.
#[cfg(not(target_arch = "x86_64"))]
mod mode {
    pub const DEFAULT: u32 = 0;

    pub fn get() -> u32 {
        DEFAULT
    }

    pub fn set(_: u32) {}
}
