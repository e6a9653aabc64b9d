//! A 3x3 convolution of an image twice as high and wide, as four phases with 2 x 2 taps each.

use crate::ir::Window;

/// Rows and columns of the convolution; offset -1 has index 0.
pub(super) const KERNEL: usize = 3;
/// Rows and columns of an unfolded pixel, and of the taps of an output phase.
pub(super) const SIDE: usize = 2;
pub(super) const PHASES: usize = SIDE * SIDE;
/// Taps of all phases, and points of both directions.
pub(super) const TAPS: usize = Window::Up.taps() as usize;

/// The kernel offsets in one direction that tap `tap` of output phase `phase` sums, each with the phase of the unfolded
/// pixel that it reads. Kernel offset d of output row 2y + phase reads unfolded row 2y + phase + d, which is row
/// `(phase + d) mod 2` of small row `y + (phase + d) div 2`.
pub(super) fn offsets(phase: usize, tap: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    (0..KERNEL).filter_map(move |offset| {
        let unfolded = (phase + offset) as isize - 1;
        let small = phase as isize + tap as isize - 1;
        (unfolded.div_euclid(2) == small).then_some((offset, unfolded.rem_euclid(2) as usize))
    })
}
