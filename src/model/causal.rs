//! Which input frames an output frame reads, and the slab of weights for each.
//! A clip is padded by repeating its first frame. Taps on repetitions are summed at load time, into slabs for the first
//! frames: frame 0 costs one tap instead of three, so a still image is a two-dimensional network.

use crate::ir::{FIRST_FRAME_SLAB, OWN_SLABS, PAIR_SLABS, Window};

/// One summand of a slab: the temporal tap of the 3x3x3 convolution (0 is the oldest frame, 2 the newest), and the
/// frame offset of a folded 1x1x1 convolution before it (0 without one).
pub type Product = (usize, usize);

/// The temporal behaviour of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Time {
    /// Kernel 1: a frame reads itself.
    Still,
    /// Kernel 3: a frame reads itself and the two before it.
    Causal,
    /// The same by Winograd F(2,3) in time: frames 2k + 1 and 2k + 2 share products. With g0 to g2 the taps, and d0 to
    /// d3 the input frames of both, oldest first:
    ///
    ///     shared: m1 = (g0 + g1 + g2)/2 (d1 + d2)    m2 = (g0 - g1 + g2)/2 (d2 - d1)
    ///     first frame: m1 + m2 + g0 (d0 - d2)        second frame: m1 - m2 - g2 (d1 - d3)
    ///
    /// Slabs: that of m1, of m2, of the first frame, of the second frame, of frame 0. A pair is fixed by its frames'
    /// numbers in the clip, and either frame can be computed alone with the same products. With [`Window::Up`] the sums
    /// and differences of frames are halved, and the slabs of pairs are twice as large.
    Paired,
    /// Kernel 3, stride 2: output f reads inputs 2f - 2, 2f - 1 and 2f.
    Halve,
    /// Kernel 3 after an unfolding of one frame into two: input t becomes frames 2t - 1 and 2t, and input 0 becomes
    /// frame 0 alone. Multiplied out, an output frame reads two input frames.
    Double,
}

const CAUSAL: [&[Product]; 5] = [&[(0, 0)], &[(1, 0)], &[(2, 0)], &[(0, 0), (1, 0)], &[(0, 0), (1, 0), (2, 0)]];
const PAIRED: [&[Product]; 5] = [CAUSAL[4], CAUSAL[4], CAUSAL[0], CAUSAL[2], CAUSAL[4]];
const PAIRED_FACTORS: [&[f64]; 5] = [&[0.5, 0.5, 0.5], &[0.5, -0.5, 0.5], &[1.0], &[-1.0], ONES];
/// With halved sums of frames.
const HALVED_PAIR_FACTORS: [&[f64]; 5] = [ONES, &[1.0, -1.0, 1.0], &[2.0], &[-2.0], ONES];
const ONES: &[f64] = &[1.0; 3];
const HALVE: [&[Product]; 4] = [CAUSAL[0], CAUSAL[1], CAUSAL[2], CAUSAL[4]];
const DOUBLE: [&[Product]; 7] = [
    &[(0, 0), (1, 1)],         // odd frame 2t - 1, from input t - 1
    &[(2, 0)],                 // odd frame, from input t
    &[(0, 1)],                 // even frame 2t, from input t - 1
    &[(1, 0), (2, 1)],         // even frame, from input t
    &[(0, 0), (1, 0)],         // frame 1, from input 0, which has one frame
    &[(0, 0)],                 // frame 2, from input 0
    &[(0, 0), (1, 0), (2, 0)], // frame 0
];
const DOUBLE_BIASES: [&[Product]; 4] = [
    &[(0, 0), (1, 1), (2, 0)], // odd frames
    &[(0, 1), (1, 0), (2, 1)], // even frames
    &[(0, 0), (1, 0), (2, 0)], // frames 0 and 1
    &[(0, 0), (1, 0), (2, 1)], // frame 2
];

/// The terms and the bias of an output frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recipe {
    /// (input frame, slab), oldest first.
    terms: [(u64, u8); 3],
    len: u8,
    pub bias: u8,
}

impl Recipe {
    fn new(terms: &[(u64, u8)], bias: u8) -> Recipe {
        let mut all = [(0, 0); 3];
        all[..terms.len()].copy_from_slice(terms);
        Recipe { terms: all, len: terms.len() as u8, bias }
    }

    pub fn terms(&self) -> &[(u64, u8)] {
        &self.terms[..usize::from(self.len)]
    }
}

/// The pair that a frame belongs to: frames 2k + 1 and 2k + 2 are one. Frame 0 is alone.
pub fn pair_of(frame: u64) -> u64 {
    frame.div_ceil(2)
}

impl Time {
    /// The products that each slab sums.
    pub fn slabs(self) -> &'static [&'static [Product]] {
        match self {
            Time::Still => &CAUSAL[..1],
            Time::Causal => &CAUSAL,
            Time::Paired => &PAIRED,
            Time::Halve => &HALVE,
            Time::Double => &DOUBLE,
        }
    }

    /// What each product of a slab is multiplied by.
    pub fn factors(self, window: Window, slab: usize) -> &'static [f64] {
        match (self, window) {
            (Time::Paired, Window::Up) => HALVED_PAIR_FACTORS[slab],
            (Time::Paired, _) => PAIRED_FACTORS[slab],
            _ => &ONES[..self.slabs()[slab].len()],
        }
    }

    /// How many of the first slabs the frames need whose last slab is `slab`.
    pub fn slabs_up_to(self, slab: u8) -> u64 {
        u64::from(if self == Time::Paired { PAIR_SLABS.max(slab + 1) } else { slab + 1 })
    }

    /// The products that each bias vector sums the 1x1x1 bias of.
    pub fn biases(self) -> &'static [&'static [Product]] {
        match self {
            Time::Still => &CAUSAL[..1],
            Time::Causal | Time::Paired | Time::Halve => &DOUBLE_BIASES[2..3],
            Time::Double => &DOUBLE_BIASES,
        }
    }

    pub fn recipe(self, frame: u64) -> Recipe {
        let f = frame;
        match (self, f) {
            (Time::Still, _) => Recipe::new(&[(f, 0)], 0),
            (Time::Causal | Time::Paired, 0) => Recipe::new(&[(0, FIRST_FRAME_SLAB)], 0),
            (Time::Causal, 1) => Recipe::new(&[(0, 3), (1, 2)], 0),
            (Time::Causal, _) => Recipe::new(&[(f - 2, 0), (f - 1, 1), (f, 2)], 0),
            (Time::Paired, _) if f % 2 == 1 => {
                Recipe::new(&[(f.saturating_sub(2), OWN_SLABS[0]), (f - 1, 0), (f, 1)], 0)
            }
            (Time::Paired, _) => Recipe::new(&[(f - 2, 0), (f - 1, 1), (f, OWN_SLABS[1])], 0),
            (Time::Halve, 0) => Recipe::new(&[(0, 3)], 0),
            (Time::Halve, _) => Recipe::new(&[(2 * f - 2, 0), (2 * f - 1, 1), (2 * f, 2)], 0),
            (Time::Double, 0) => Recipe::new(&[(0, 6)], 2),
            (Time::Double, 1) => Recipe::new(&[(0, 4), (1, 1)], 2),
            (Time::Double, 2) => Recipe::new(&[(0, 5), (1, 3)], 3),
            (Time::Double, _) if f % 2 == 1 => Recipe::new(&[(f / 2, 0), (f / 2 + 1, 1)], 0),
            (Time::Double, _) => Recipe::new(&[(f / 2 - 1, 2), (f / 2, 3)], 1),
        }
    }

    /// The oldest input frame that output frame `frame` or a later one reads.
    pub fn oldest(self, frame: u64) -> u64 {
        match self {
            Time::Still => frame,
            // Recipes never reach further back than those of earlier frames.
            _ => self.recipe(frame).terms()[0].0,
        }
    }

    /// Output frames that `inputs` input frames suffice for.
    pub fn outputs(self, inputs: u64) -> u64 {
        match self {
            Time::Still | Time::Causal | Time::Paired => inputs,
            Time::Halve => inputs.div_ceil(2),
            Time::Double => (2 * inputs).saturating_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: frames of the unfolded sequence that an output frame reads, oldest first, as (input frame, frame
    /// offset in the unfolding).
    fn history(time: Time, frame: u64) -> Vec<(u64, usize)> {
        let unfolded = |f: i64| -> (u64, usize) {
            let f = f.max(0) as u64;
            match time {
                Time::Double if f == 0 => (0, 0),
                Time::Double => (f.div_ceil(2), usize::from(f.is_multiple_of(2))),
                _ => (f, 0),
            }
        };
        let newest = if time == Time::Halve { 2 * frame } else { frame } as i64;
        match time {
            Time::Still => vec![(frame, 0)],
            _ => (newest - 2..=newest).map(unfolded).collect(),
        }
    }

    #[test]
    fn recipes_have_exactly_the_products_of_the_definition() {
        for time in [Time::Still, Time::Causal, Time::Halve, Time::Double] {
            for frame in 0..12 {
                let mut expected: Vec<(u64, Product)> =
                    history(time, frame).into_iter().enumerate().map(|(tap, (t, z))| (t, (tap, z))).collect();
                let recipe = time.recipe(frame);
                let mut found: Vec<(u64, Product)> = Vec::new();
                for (t, slab) in recipe.terms() {
                    found.extend(time.slabs()[usize::from(*slab)].iter().map(|p| (*t, *p)));
                }
                expected.sort_unstable();
                found.sort_unstable();
                assert_eq!(found, expected, "{time:?} frame {frame}");

                let mut biases: Vec<Product> = expected.iter().map(|(_, p)| *p).collect();
                let mut bias = time.biases()[usize::from(recipe.bias)].to_vec();
                biases.sort_unstable();
                bias.sort_unstable();
                assert_eq!(bias, biases, "bias of {time:?} frame {frame}");
            }
        }
    }

    /// Every frame of a pair, from the slabs and the transformed inputs, against the definition.
    #[test]
    fn pairs_have_the_sums_of_the_definition() {
        let taps = [3.0, -5.0, 7.0];
        let input = |frame: u64| (frame * frame) as f64 + 2.0;
        for (frame, window) in (0..12).flat_map(|frame| [(frame, Window::Same), (frame, Window::Up)]) {
            let slab = |slab: usize| {
                let products = Time::Paired.slabs()[slab].iter().zip(Time::Paired.factors(window, slab));
                let halved = if window == Window::Up && slab < usize::from(PAIR_SLABS) { 0.5 } else { 1.0 };
                products.map(|((tap, _), factor)| taps[*tap] * factor * halved).sum::<f64>()
            };
            let expected: f64 =
                history(Time::Causal, frame).iter().zip(taps).map(|((t, _), tap)| input(*t) * tap).sum();
            let d: Vec<(f64, u8)> = Time::Paired.recipe(frame).terms().iter().map(|(t, s)| (input(*t), *s)).collect();
            let found = match d[..] {
                [(x, 4)] => slab(4) * x,
                [(d0, 2), (d1, 0), (d2, 1)] => slab(0) * (d1 + d2) + slab(1) * (d2 - d1) + slab(2) * (d0 - d2),
                [(d1, 0), (d2, 1), (d3, 3)] => slab(0) * (d1 + d2) - slab(1) * (d2 - d1) + slab(3) * (d1 - d3),
                _ => panic!("frame {frame}: {d:?}"),
            };
            assert_eq!(found, expected, "frame {frame}");
        }
    }

    /// Backends compute the first frame in a form of its own, and refuse frames that mix the forms.
    #[test]
    fn the_slab_of_the_first_frame_is_alone() {
        for time in [Time::Causal, Time::Paired] {
            for frame in 0..12 {
                let recipe = time.recipe(frame);
                let found = recipe.terms().iter().any(|(_, slab)| *slab == FIRST_FRAME_SLAB);
                assert_eq!(found, frame == 0, "{time:?} {frame}");
                assert!(!found || recipe.terms().len() == 1, "{time:?} {frame}");
            }
        }
    }

    #[test]
    fn outputs_are_those_that_the_inputs_suffice_for() {
        for time in [Time::Still, Time::Causal, Time::Paired, Time::Halve, Time::Double] {
            for frame in 0..12 {
                let newest = time.recipe(frame).terms().last().unwrap().0;
                assert!(time.outputs(newest + 1) > frame && time.outputs(newest) <= frame, "{time:?} {frame}");
                assert!((frame..40).all(|later| time.recipe(later).terms()[0].0 >= time.oldest(frame)));
            }
        }
    }
}
