//! Pairs of columns that share products: layers of one slab with a normalised input.

use super::pairs::{ClipCase, FRAMES};
use super::*;

fn single(cin: u64, cout: u64, shortcut: Option<u64>) -> ConvLayout {
    ConvLayout { slabs: 1, shortcut, ..layout(cin, cout, Window::Same, Prologue::NormSilu) }
}

/// Frames of an odd and an even number of columns, of one column, and with the last tile cut in each place.
const SIZES: [(u64, u64); 9] = [(1, 1), (3, 2), (2, 6), (7, 5), (16, 16), (18, 34), (37, 53), (24, 63), (130, 200)];

#[test]
fn pairs_of_columns_match_the_cpu() {
    let gpus = gpus();
    if gpus.is_empty() {
        return;
    }
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    for (height, width) in SIZES {
        for (cin, cout, shortcut) in [
            (8, 8, None),
            (12, 20, None),
            (16, 24, Some(24)),
            (64, 64, None),
            (72, 128, Some(80)),
            (128, 136, None),
            (256, 128, Some(256)),
        ] {
            let input = FrameShape::new(height, width, cin);
            let case = ConvCase { layout: single(cin, cout, shortcut), input, residual: true };
            let what = format!("{cin} to {cout}, {height}x{width}");
            assert_close(&gpus, 2e-3, &what, &super::run(&cpu, &case), |cuda| super::run(cuda, &case));
        }
    }
}

#[test]
fn frames_alone_have_the_bits_of_frames_together() {
    for gpu in &gpus() {
        for (height, width) in SIZES {
            for (cin, cout, shortcut) in [(16, 24, Some(24)), (64, 136, None)] {
                let layout = ConvLayout { biases: 1, ..single(cin, cout, shortcut) };
                let input = FrameShape::new(height, width, cin);
                let case = ClipCase { layout, input, factor: 1.0, bias: (0.0, 1.0) };
                let (_, whole) = case.run(gpu, std::slice::from_ref(&(0..FRAMES)));
                for launches in [&[0..1, 1..2, 2..3, 3..4, 4..5, 5..6][..], &[0..2, 2..4, 4..6], &[0..5, 5..6]] {
                    let what = format!("{cin} to {cout}, {height}x{width} in {}: {launches:?}", name(gpu));
                    assert!(case.run(gpu, launches).1 == whole, "{what}");
                }
            }
        }
    }
}
