//! How much work a launch may be. Windows resets the driver of a display card after about 2 s of one launch, and a
//! cancel waits for launches to end. `docs/kernels.md` says which kernels need no limit. Needs no device.

use std::ops::Range;

use super::rows::tile_grid;
use crate::ir::{ConvLayout, FrameShape, Rates};

/// Seconds that a launch may be estimated to take.
const MOST_SECONDS: f64 = 0.3;
/// Operations over this part of the limit are long.
const LONG: u64 = 16;
/// Terms of an output frame, a shortcut aside: three frames in time.
const MOST_TERMS: u64 = 3;
/// Attention reaches about half the rate of convolutions: 190 TFLOP/s on the H200 with `mma.sync`, 414 for `conv_mma`.
const ATTENTION_COST: u64 = 2;

/// The most multiplications of a launch.
#[derive(Debug, Clone, Copy)]
pub struct LaunchLimit(pub u64);

impl LaunchLimit {
    pub fn new(rates: &Rates) -> LaunchLimit {
        #[cfg(test)]
        if let Some(forced) = testing::FORCED.get() {
            return LaunchLimit(forced);
        }
        LaunchLimit((MOST_SECONDS * rates.products) as u64)
    }

    /// Whether an operation of so many multiplications is long. Long ones are not queued, so that a cancel acts soon.
    pub fn is_long(self, products: u64) -> bool {
        products > self.0 / LONG
    }

    /// How many pieces of so many multiplications a launch may have; one if even that is too much.
    pub fn pieces(self, products: u64) -> u64 {
        (self.0 / products.max(1)).max(1)
    }

    /// Divides pieces among launches: as few as possible, of sizes as equal as possible.
    pub fn launches(self, pieces: u64, products: u64) -> impl Iterator<Item = Range<u64>> {
        let launches = pieces.div_ceil(self.pieces(products)).max(1);
        #[cfg(test)]
        testing::SPLIT.set(testing::SPLIT.get() + u64::from(launches > 1));
        let size = pieces.div_ceil(launches).max(1);
        (0..pieces).step_by(size as usize).map(move |start| start..pieces.min(start + size))
    }
}

/// Multiplications of so many rows of the tile grid, of each output frame. Frames at the start of a clip take fewer.
pub fn conv_products(layout: &ConvLayout, input: FrameShape, rows: u64) -> u64 {
    let terms = layout.window.taps() * layout.slabs.min(MOST_TERMS) * layout.cin + layout.shortcut.unwrap_or(0);
    let pixels = tile_grid(layout, input).width.saturating_mul(rows);
    pixels.saturating_mul(terms).saturating_mul(layout.cout)
}

/// Multiplications of so many queries of a frame, as convolutions of the same time have them.
pub fn attention_products(shape: FrameShape, queries: u64) -> u64 {
    queries.saturating_mul(shape.pixels()).saturating_mul(2 * ATTENTION_COST * shape.channels)
}

/// For tests: a limit in place of the device's, and how much work was divided among several launches. Per thread.
#[cfg(test)]
pub mod testing {
    use std::cell::Cell;

    thread_local! {
        pub static FORCED: Cell<Option<u64>> = const { Cell::new(None) };
        pub static SPLIT: Cell<u64> = const { Cell::new(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Norm, Prologue, Window};

    #[test]
    fn launches_cover_every_piece_once_and_keep_the_limit() {
        for (limit, pieces, products) in
            [(100, 10, 30), (100, 10, 100), (100, 10, 7), (100, 7, 1), (1, 5, 9), (9, 0, 1)]
        {
            let launches: Vec<_> = LaunchLimit(limit).launches(pieces, products).collect();
            let covered: Vec<u64> = launches.iter().cloned().flatten().collect();
            assert_eq!(covered, (0..pieces).collect::<Vec<_>>());
            for launch in &launches {
                let count = launch.end - launch.start;
                assert!(count == 1 || count * products <= limit, "{count} of {products} within {limit}");
            }
            let fewest = pieces.div_ceil((limit / products).max(1));
            assert!(launches.len() as u64 <= fewest, "{launches:?}");
        }
    }

    /// Estimates of whole operations, in seconds, on an H200 and on a card with a twentieth of its multiprocessors.
    #[test]
    fn slow_cards_split_what_an_h200_does_not() {
        let rates = |products| Rates { products, memory: 1e12, copies: 1e10, copy_contention: 0.0 };
        let (h200, rtx_3060) = (LaunchLimit::new(&rates(3.2e14)), LaunchLimit::new(&rates(7.6e12)));
        let layout = ConvLayout {
            cin: 128,
            cout: 128,
            window: Window::Same,
            prologue: Prologue::NormSilu,
            slabs: 4,
            shortcut: None,
            biases: 1,
            norm: Norm::Group { groups: 32 },
            pairs: None,
            first_frame_slab: None,
        };
        let (full_hd, ultra_hd) = (FrameShape::new(1080, 1920, 128), FrameShape::new(2160, 3840, 128));
        let launches = |limit: LaunchLimit, shape: FrameShape, frames: u64| {
            limit.launches(shape.height.div_ceil(8), frames * conv_products(&layout, shape, 8)).count()
        };
        assert_eq!((launches(h200, full_hd, 8), launches(h200, ultra_hd, 8)), (1, 1));
        assert_eq!((launches(rtx_3060, full_hd, 1), launches(rtx_3060, ultra_hd, 1)), (1, 2));
        let attention = |limit: LaunchLimit, height, width| {
            let shape = FrameShape::new(height, width, 512);
            limit.launches(shape.pixels().div_ceil(64), attention_products(shape, 64)).count()
        };
        assert_eq!((attention(h200, 135, 240), attention(h200, 270, 480)), (1, 1));
        assert_eq!((attention(rtx_3060, 135, 240), attention(rtx_3060, 270, 480)), (1, 16));
    }
}
