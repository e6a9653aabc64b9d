//! AMX: whether the processor and the system allow it, and sums of bf16 on its tiles.
//! By inline assembly: the compiler's own AMX functions are not stable.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use super::bf16::{AHEAD, Bf16Kernels, BlockProduct, TILE, WEIGHT_TILE};
use super::vector::PANEL;
use super::x86::Amx;

/// Whether tiles can be used. Asks the system for them, for the whole process.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && is_permitted())
}

/// AMX-TILE and AMX-BF16 of CPUID.
pub fn has_tiles() -> bool {
    const TILES: u32 = 1 << 24 | 1 << 22;
    __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & TILES == TILES
}

/// Linux saves tiles only for processes that asked for it.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the call takes two numbers and touches no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// The operand of `ldtilecfg`: eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl Bf16Kernels for Amx {
    unsafe fn with_tiles(work: impl FnOnce()) {
        /// Releases the tiles, also after a panic: a thread that holds some is slower to switch.
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                // SAFETY: the processor has AMX, by the contract of `with_tiles`.
                unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
            }
        }
        // SAFETY: the processor has AMX and the system permits it. No other code of this library uses tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, preserves_flags)) };
        let _release = Release;
        work();
    }

    unsafe fn product(block: &BlockProduct) {
        // SAFETY: by this function's contract.
        unsafe {
            match block.tiles {
                1 => product_1(block),
                2 => product_2(block),
                3 => product_3(block),
                4 => product_4(block),
                5 => product_5(block),
                _ => product_6(block),
            }
        }
    }
}

/// A function that keeps the sums of its tiles of positions in AMX tiles. For each block of channels and tap it loads a
/// tile of weights once. Weights are prefetched two tiles ahead, because the hardware does not follow tile loads.
macro_rules! tile_product {
    ($name:ident, $(($tile:literal, $at:ident)),*) => {
        /// # Safety
        /// As [`Bf16Kernels::product`], inside [`Bf16Kernels::with_tiles`].
        unsafe fn $name(block: &BlockProduct) {
            const ROW: usize = PANEL * size_of::<f32>();
            // SAFETY: the block is valid, by this function's contract. The compiler itself uses no tiles.
            unsafe {
                if block.add {
                    $(asm!(concat!("tileloadd tmm", $tile, ", [{0} + {1}]"),
                        in(reg) block.out.add($tile * TILE * PANEL), in(reg) ROW,
                        options(nostack, readonly, preserves_flags));)*
                } else {
                    $(asm!(concat!("tilezero tmm", $tile), options(nostack, nomem, preserves_flags));)*
                }
                let (mut weights, mut ahead) = (block.weights, block.ahead);
                for channels in 0..block.blocks {
                    for tap in block.taps {
                        let offset = channels * block.block + tap;
                        asm!(
                            "tileloadd tmm6, [{w} + {row}]",
                            $(concat!("tileloadd tmm7, [{", stringify!($at), "} + {step}]"),
                            concat!("tdpbf16ps tmm", $tile, ", tmm7, tmm6"),)*
                            ".irp line, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
                            "prefetcht0 [{w} + 2048 + 64 * \\line]",
                            ".endr",
                            ".irp line, 0, 1, 2, 3, 4, 5, 6, 7",
                            "prefetcht1 [{ahead} + 64 * \\line]",
                            ".endr",
                            $($at = in(reg) block.at[$tile].wrapping_add(offset),)*
                            step = in(reg) block.step * 2,
                            w = in(reg) weights,
                            row = in(reg) 64usize,
                            ahead = in(reg) ahead,
                            options(nostack, readonly, preserves_flags),
                        );
                        weights = weights.wrapping_add(WEIGHT_TILE);
                        ahead = ahead.wrapping_add(AHEAD);
                    }
                }
                $(asm!(concat!("tilestored [{0} + {1}], tmm", $tile), in(reg) block.out.add($tile * TILE * PANEL),
                    in(reg) ROW, options(nostack, preserves_flags));)*
            }
        }
    };
}

tile_product!(product_1, (0, a0));
tile_product!(product_2, (0, a0), (1, a1));
tile_product!(product_3, (0, a0), (1, a1), (2, a2));
tile_product!(product_4, (0, a0), (1, a1), (2, a2), (3, a3));
tile_product!(product_5, (0, a0), (1, a1), (2, a2), (3, a3), (4, a4));
tile_product!(product_6, (0, a0), (1, a1), (2, a2), (3, a3), (4, a4), (5, a5));
