//! Work that is too much for one launch, as on slow cards: the same bits from many.

use super::graphs::{LatentClip, open};
use super::*;
use crate::backend::gpu::limit_testing::{FORCED, SPLIT};
use crate::backend::gpu::{attention_products, conv_products};
use crate::backend::tests::bands::{self, Cache};

/// Runs `work` with launches of any length, then with limits down to one row of tiles, and compares.
fn assert_same_when_split<T: PartialEq>(gpu: &mut Cuda, limits: &[u64], what: &str, work: impl Fn(&Cuda) -> T) {
    gpu.launcher.limit = LaunchLimit(u64::MAX);
    SPLIT.set(0);
    let whole = work(gpu);
    assert_eq!(SPLIT.get(), 0, "{what}");
    for limit in limits {
        gpu.launcher.limit = LaunchLimit(*limit);
        SPLIT.set(0);
        let found = work(gpu);
        assert!(SPLIT.get() > 0, "{what} is not split by a limit of {limit}");
        assert!(found == whole, "{what} in {} with a limit of {limit}", name(gpu));
    }
}

#[test]
fn split_convolutions_keep_their_bits() {
    for mut gpu in gpus() {
        for (window, cin, cout) in [
            (Window::Same, 72, 136),
            (Window::Same, 64, 64),
            (Window::Point, 128, 24),
            (Window::Down, 64, 128),
            (Window::Up, 64, 64),
            (Window::Up, 24, 40),
            (Window::Same, 3, 128),
        ] {
            let shortcut = (window == Window::Same && cin == 72).then_some(cin + 8);
            let prologue = if cin > 3 { Prologue::NormSilu } else { Prologue::None };
            let layout = ConvLayout { shortcut, ..layout(cin, cout, window, prologue) };
            let input = FrameShape::new(134, 70, cin);
            let case = ConvCase { layout, input, residual: window != Window::Up && cin > 3 };
            // One row of tiles and one frame; two rows of all frames.
            let limits = [1, 3 * conv_products(&layout, input, 32)];
            assert_same_when_split(&mut gpu, &limits, &format!("{layout:?}"), |gpu| run(gpu, &case));
        }
    }
}

#[test]
fn split_bands_and_partial_sums_keep_their_bits_and_statistics() {
    let head = ConvLayout { norm: Norm::Group { groups: 8 }, ..layout(3, 32, Window::Same, Prologue::None) };
    let layer = layout(32, 32, Window::Same, Prologue::NormSilu);
    let halves = ConvLayout { slabs: 4, biases: 1, ..layout(72, 128, Window::Down, Prologue::None) };
    for mut gpu in gpus() {
        for cache in [None, Some(Cache::Split(32)), Some(Cache::Recomputed)] {
            let what = format!("bands with {cache:?}");
            assert_same_when_split(&mut gpu, &[1], &what, |gpu| bands::outputs(gpu, (&head, &layer), (150, 77), cache));
        }
        assert_same_when_split(&mut gpu, &[1], "partial sums", |gpu| {
            partial_sums::run(gpu, &halves, FrameShape::new(70, 54, 72), &[0..1, 1..3])
        });
    }
}

#[test]
fn split_attention_keeps_its_bits() {
    for mut gpu in gpus() {
        for shape in [FrameShape::new(31, 37, 512), FrameShape::new(20, 33, 64)] {
            // One block of queries, or two, and several blocks.
            let limits = [1, attention_products(shape, 300)];
            assert_same_when_split(&mut gpu, &limits, &format!("attention {shape:?}"), |gpu| attend(gpu, shape));
        }
    }
}

/// As on a card that takes 0.3 s for a million multiplications.
#[test]
fn whole_clip_keeps_its_bits_and_bytes_on_a_slow_card() {
    if gpus().is_empty() {
        return;
    }
    let decode = |keys: &[(&str, &str)], forced: Option<u64>| {
        FORCED.set(forced);
        let mut session = open("small", keys);
        FORCED.set(None);
        SPLIT.set(0);
        let frames = LatentClip::new(6, 48, 64).decode(&mut session);
        assert_eq!(SPLIT.get() > 10, forced.is_some(), "{} operations were split", SPLIT.get());
        (frames, session.ledger().figures())
    };
    for precision in ["fp16", "fp32"] {
        let mut keys = vec![("precision", precision)];
        let (expected, bytes) = decode(&keys, None);
        assert!(decode(&keys, Some(1 << 20)) == (expected.clone(), bytes), "{precision}");
        let limit = (bytes.peak / 10 * 7).to_string();
        keys.push(("memory_limit", &limit));
        let (limited, bytes) = decode(&keys, None);
        assert!(limited == expected && decode(&keys, Some(1 << 20)) == (expected, bytes), "{precision} within {limit}");
    }
}
