//! The contact sheet of several variants: the clip, what each gives, and how that differs from the first one.

use super::variants::{Figures, Outcome, listed};
use crate::Result;
use crate::commands::demo::{metrics, sheet};
use crate::draft::Draft;
use crate::files;
use crate::spool::Spool;
use crate::tensor::{Dtype, FrameKind};

/// Deviations from grey that the strongest difference gets, as a root mean square.
const VISIBLE: f64 = 32.0;
const MOST_GAIN: f64 = 1024.0;

/// Writes it. What it shows, in words. `first`: the number of the clip's first frame.
pub fn write(draft: Draft, clip: &Spool, outcomes: &[Outcome], figures: &[Figures], first: u64) -> Result<String> {
    let worst = figures.iter().filter_map(|figures| figures.distance.as_ref().map(|distance| distance.worst()));
    let worst = worst.filter(|(_, square)| *square > 0.0).max_by(|a, b| a.1.total_cmp(&b.1)).map(|(frame, _)| frame);
    let mut frames: Vec<u64> = [0, clip.count() / 2].into_iter().chain(worst).collect();
    frames.sort_unstable();
    frames.dedup();
    // Three frames of each clip as floats and in 8 bits, their differences, and the sheet itself.
    clip.kind.spare(100 * (1 + outcomes.len()))?;
    let rgb = |spool: &Spool| {
        frames.iter().map(|frame| spool.kind.rgb(&spool.frame(*frame)?)).collect::<Result<Vec<Vec<f32>>>>()
    };
    let (original, decoded) = (rgb(clip)?, outcomes.iter().map(|o| rgb(&o.video)).collect::<Result<Vec<_>>>()?);
    let gain = gain(&decoded);

    let is_worst = |frame: u64| worst == Some(frame);
    let label = |frame: u64| format!("{}FRAME {}", if is_worst(frame) { "WORST " } else { "" }, first + frame);
    let mut rows = vec![frames.iter().map(|frame| label(*frame)).zip(original.iter().map(|p| eight_bits(p))).collect()];
    for (outcome, pictures) in outcomes.iter().zip(&decoded) {
        rows.push(row(outcome.name.to_uppercase(), pictures.iter().map(|picture| eight_bits(picture))));
    }
    for (outcome, pictures) in outcomes.iter().zip(&decoded).skip(1) {
        let label = format!("{} - {} TIMES {gain}", outcome.name, outcomes[0].name).to_uppercase();
        let pairs = decoded[0].iter().zip(pictures);
        rows.push(row(label, pairs.map(|(a, b)| sheet::difference(a, b, gain as f32))));
    }
    let (kind, pixels) = sheet::grid(FrameKind::pixels(Dtype::U8, clip.kind.width, clip.kind.height), &rows);
    files::encode_rgb(draft.create()?, kind, &pixels)?;
    draft.finish()?;

    let number = |frame: &u64| format!("{}{}", first + frame, if is_worst(*frame) { " (the worst)" } else { "" });
    let names: Vec<&str> = outcomes.iter().map(|outcome| outcome.name.as_str()).collect();
    let numbers: Vec<String> = frames.iter().map(number).collect();
    let mut said =
        format!("{}x{}; frames {} of the clip, {}", kind.width, kind.height, listed(&numbers), listed(&names));
    if let Some((reference, others)) = names.split_first().filter(|(_, others)| !others.is_empty()) {
        said += &format!("; then {} less {reference}, times {gain} around grey", listed(others));
    }
    Ok(said)
}

/// The label stands above the first.
fn row(label: String, pictures: impl Iterator<Item = Vec<u8>>) -> sheet::Row {
    std::iter::once(label).chain(std::iter::repeat(String::new())).zip(pictures).collect()
}

/// A power of two, one for all differences, so that they can be compared.
fn gain(decoded: &[Vec<Vec<f32>>]) -> f64 {
    let Some((reference, others)) = decoded.split_first() else { return 1.0 };
    let squares = others.iter().flat_map(|pictures| reference.iter().zip(pictures));
    let most = squares.map(|(a, b)| metrics::mean_square(a, b)).fold(0.0, f64::max);
    if most > 0.0 { (VISIBLE / most.sqrt()).log2().floor().exp2().clamp(1.0, MOST_GAIN) } else { 1.0 }
}

pub fn eight_bits(values: &[f32]) -> Vec<u8> {
    values.iter().map(|value| value.round() as u8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gain_makes_the_strongest_difference_visible() {
        let flat = |value: f32| vec![vec![value; 27]];
        assert_eq!(gain(&[flat(100.0), flat(100.0)]), 1.0);
        assert_eq!(gain(&[flat(100.0), flat(100.25), flat(100.1)]), 128.0);
        assert_eq!(gain(&[flat(0.0), flat(255.0)]), 1.0);
        assert_eq!(gain(&[flat(100.0), flat(100.0001)]), 1024.0);
    }
}
