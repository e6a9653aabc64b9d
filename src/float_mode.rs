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

#[cfg(all(target_arch = "x86_64", not(miri)))]
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

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod mode {
    use std::arch::asm;

    /// FPCR: rounds to nearest, keeps denormals, traps nothing.
    pub const DEFAULT: u32 = 0;

    pub fn get() -> u32 {
        let mode: u64;
        // SAFETY: reads a register.
        unsafe { asm!("mrs {}, fpcr", out(reg) mode, options(nostack, nomem, preserves_flags)) };
        mode as u32
    }

    pub fn set(mode: u32) {
        // SAFETY: the default, which Rust assumes, or what the host had.
        unsafe { asm!("msr fpcr, {}", in(reg) u64::from(mode), options(nostack, preserves_flags)) };
    }
}

/// Not done on other processors, nor by an interpreter.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod mode {
    pub const DEFAULT: u32 = 0;

    pub fn get() -> u32 {
        DEFAULT
    }

    pub fn set(_: u32) {}
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::hint::black_box;

    use super::*;

    /// What x86 keeps beside the mode: which exceptions have occurred.
    const FLAGS: u32 = 0x3f;
    /// Rounding towards minus infinity.
    const DOWN: u32 = if cfg!(target_arch = "aarch64") { 0b10 << 22 } else { mode::DEFAULT | 0b01 << 13 };

    #[test]
    fn the_mode_of_the_thread_is_restored() {
        // The compiler does not know the mode, and could move a division that it sees through.
        let third = || black_box(black_box(1.0f32) / black_box(3.0f32));
        let nearest = third();
        mode::set(DOWN);
        let down = third();
        let inside = {
            let _mode = DefaultMode::enter();
            third()
        };
        let after = (mode::get() & !FLAGS, third());
        set_default();
        assert!(down < nearest);
        assert_eq!((inside, after), (nearest, (DOWN, down)));
    }
}
