//! Convolutions in bands against the same of whole frames, bit for bit, for every placement of the causal cache.

use super::*;
use crate::backend::tests::bands::{CACHE_FRAMES, Cache, FRAMES, block_outputs, outputs, run_chunks};
use crate::ir::CacheFormat;

#[test]
fn bands_match_whole_frames_bit_for_bit() {
    let head = ConvLayout { norm: Norm::Group { groups: 8 }, ..layout(3, 32, Window::Same, Prologue::None) };
    let layer = layout(32, 32, Window::Same, Prologue::NormSilu);
    for gpu in gpus() {
        for (height, width) in [(70, 77), (16, 300), (150, 33)] {
            let whole = outputs(&gpu, (&head, &layer), (height, width), None);
            let columns = [0, 32, width / 2, width - 1, width].map(Cache::Split);
            for cache in columns.into_iter().chain([Cache::Recomputed]) {
                let banded = outputs(&gpu, (&head, &layer), (height, width), Some(cache));
                assert!(banded == whole, "{height} x {width}, {cache:?}, {}", name(&gpu));
            }
        }
    }
}

/// Every placement gives the same bits, close to frames that are rounded here.
#[test]
fn bands_with_caches_in_8_bits_read_them_as_they_are_rounded() {
    let head = ConvLayout { norm: Norm::Group { groups: 8 }, ..layout(3, 32, Window::Same, Prologue::None) };
    for channels in [32, 128] {
        let head = ConvLayout { cout: channels, ..head };
        let layer = layout(channels, channels, Window::Same, Prologue::NormSilu);
        for gpu in gpus() {
            for (height, width) in [(70, 77), (16, 300), (150, 33)] {
                let run = |cache, format| run_chunks(&gpu, (&head, &layer), (height, width), cache, format);
                let (_, exact) = run(None, CacheFormat::Exact);
                let (_, right) = run(None, CacheFormat::U8);
                let columns = [0, 32, width / 2, width - 1, width].map(Cache::Split);
                let mut first: Option<Vec<Vec<u8>>> = None;
                for cache in columns.into_iter().chain([Cache::Recomputed]) {
                    let (bytes, values) = run(Some(cache), CacheFormat::U8);
                    let what = format!("{channels} channels, {height} x {width}, {cache:?}, {}", name(&gpu));
                    let [loss, error] = [&exact, &right].map(|of| relative_error(&values, of));
                    assert!(loss > 1e-4 && loss < 1e-2 && error < loss / 3.0, "{loss} {error} {what}");
                    assert!(*first.get_or_insert_with(|| bytes.clone()) == bytes, "{what}");
                }
            }
        }
    }
}

/// The convolution from pixels normalises its output: with the model's own channels and groups, with part of a channel
/// tile, and with more than one.
#[test]
fn rematerialised_frames_are_normalised_as_whole_frames() {
    for gpu in gpus() {
        for (channels, groups, prologue) in
            [(128, 32, Prologue::NormSilu), (40, 10, Prologue::Norm), (144, 4, Prologue::NormSilu)]
        {
            let head = ConvLayout { norm: Norm::Group { groups }, ..layout(3, channels, Window::Same, Prologue::None) };
            let layer =
                ConvLayout { norm: Norm::Group { groups }, ..layout(channels, channels, Window::Same, prologue) };
            let whole = outputs(&gpu, (&head, &layer), (70, 165), None);
            let banded = outputs(&gpu, (&head, &layer), (70, 165), Some(Cache::Recomputed));
            assert!(banded == whole, "{channels} channels in {groups} groups, {}", name(&gpu));
        }
    }
}

#[test]
fn rematerialised_hidden_frames_change_no_bit() {
    for gpu in gpus() {
        for (channels, groups) in [(128, 32), (40, 10)] {
            let head = ConvLayout { norm: Norm::Group { groups }, ..layout(3, channels, Window::Same, Prologue::None) };
            let layer = ConvLayout {
                norm: Norm::Group { groups },
                ..layout(channels, channels, Window::Same, Prologue::NormSilu)
            };
            for size in [(70, 77), (150, 165)] {
                let whole = block_outputs(&gpu, &head, &layer, size, None);
                for hidden in [CACHE_FRAMES, 3, FRAMES - 1] {
                    let banded = block_outputs(&gpu, &head, &layer, size, Some(hidden));
                    assert!(banded == whole, "{channels} channels, {size:?}, {hidden} materialised, {}", name(&gpu));
                }
            }
        }
    }
}
