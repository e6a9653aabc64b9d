//! Which input frames an output frame reads, and the slab of weights for each: generated from a convolution's axis of
//! time. Taps that fall on one input frame are summed at load time. So repeated first frames and unfolded frames cost
//! nothing: frame 0 has one term instead of three, and a still image is a two-dimensional network.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::ir::PairSlabs;
use crate::model::graph::{FirstFrame, TimeAxis};

/// One summand of a slab: the tap in time (0 is the oldest frame), and a part. Before the convolution that is one of the
/// frames that an input frame is unfolded into; behind it, one of those that an output is split into.
pub type Product = (usize, usize);

/// A convolution over time, as it is lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TimeRule {
    pub axis: TimeAxis,
    /// Frames that each input frame after the first is unfolded into before the convolution.
    pub unfold: u64,
    /// Frames that each output of the convolution after the first is split into, by its channels.
    pub split: u64,
    pub pairs: Pairs,
}

/// Whether output frames 2k + 1 and 2k + 2 share products, by Winograd F(2,3) in time. With g0 to g2 the taps, and d0
/// to d3 the input frames of both, oldest first:
///
///     shared: m1 = (g0 + g1 + g2)/2 (d1 + d2)    m2 = (g0 - g1 + g2)/2 (d2 - d1)
///     first frame: m1 + m2 + g0 (d0 - d2)        second frame: m1 - m2 - g2 (d1 - d3)
///
/// Slabs: that of m1, of m2, of the first frame, of the second frame, of frame 0. A pair is fixed by its frames'
/// numbers in the clip, and either frame can be computed alone with the same products. Pairs come before taps are
/// merged: frame 1 reads a repeated frame 0 twice, as d0 and d1. After zeros frames 0 and 1 are computed directly, by
/// their one and two taps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pairs {
    None,
    Plain,
    /// Sums and differences of frames are halved, and slabs doubled: for inputs that are not normalised, whose sums
    /// might leave the range of a 16-bit float.
    Halved,
}

/// The slabs of pairs come before all others: fetched weights then end with them.
pub const PAIR_SLABS: PairSlabs = PairSlabs { shared: [0, 1], own: [2, 3] };
/// After them, that of frame 0, and after zeros the middle tap of frame 1.
const AFTER_PAIRS: u8 = 4;
const MIDDLE_TAP: u8 = 5;

/// The pair that a frame belongs to: frames 2k + 1 and 2k + 2 are one. Frame 0 is alone.
pub fn pair_of(frame: u64) -> u64 {
    frame.div_ceil(2)
}

/// One summand of an output frame: an input frame, by its number, and the slab that it is convolved with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecipeTerm {
    pub input: u64,
    pub slab: u8,
}

/// The terms and the bias of an output frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recipe {
    /// Oldest first.
    terms: [RecipeTerm; MAX_TERMS],
    len: u8,
    pub bias: u8,
    /// Whether it is no sum: the output frame is the input frame of its only term.
    pub is_passed: bool,
}

const MAX_TERMS: usize = 3;

impl Recipe {
    pub fn terms(&self) -> &[RecipeTerm] {
        &self.terms[..usize::from(self.len)]
    }

    /// The same with input frames that are so much later.
    fn later(mut self, frames: u64) -> Recipe {
        self.terms.iter_mut().for_each(|term| term.input += frames);
        self
    }
}

/// A slab of weights: the sum of products, each times its factor.
#[derive(Debug, Clone, PartialEq)]
pub struct Slab {
    pub products: Vec<Product>,
    pub factors: Vec<f64>,
}

impl Slab {
    /// Which of the equal parts of the convolution's output channels it makes.
    pub fn output_part(&self, of: &Recipes) -> u64 {
        if of.rule.split > 1 { self.products[0].1 as u64 } else { 0 }
    }
}

/// The recipes of all output frames of a convolution.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipes {
    pub rule: TimeRule,
    /// Slabs of the steady state come first, that of frame 0 last: it serves the start of a clip only.
    slabs: Vec<Slab>,
    /// The products that each bias vector sums the bias of a folded convolution over.
    biases: Vec<Vec<Product>>,
    /// Of the first frames.
    early: Vec<Recipe>,
    /// Of the frames after them: one period of output frames, which reads `step` input frames further each time.
    steady: Vec<Recipe>,
    step: u64,
}

/// The taps of an output frame: their products, and the input frames that they fall on. `None`: on zeros.
type Taps = Vec<(Product, Option<u64>)>;

impl TimeRule {
    pub const fn of(axis: TimeAxis) -> TimeRule {
        TimeRule { axis, unfold: 1, split: 1, pairs: Pairs::None }
    }

    /// Output frames after which the recipe repeats, and by how many input frames it then moves.
    fn period(self) -> (u64, u64) {
        let gcd = |mut a: u64, mut b: u64| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        let common = gcd(self.unfold, self.axis.stride);
        (self.unfold / common * self.split, self.axis.stride / common)
    }

    /// Whether frame 0 of the input is frame 0 of the output.
    pub fn passes_first(self) -> bool {
        matches!(self.axis.first, FirstFrame::PassedAndRead | FirstFrame::PassedAndHidden)
    }

    fn taps(self, frame: u64) -> Taps {
        if frame == 0 && self.passes_first() {
            return Vec::new();
        }
        // Frame 0 is unfolded, or split, into one frame.
        let part = |frame: u64, parts: u64| (frame.saturating_sub(1) % parts) as usize;
        let newest = (self.axis.stride * frame.div_ceil(self.split)) as i64;
        let fall = |tap: i64| {
            let unfolded = match (newest + tap + 1 - self.axis.kernel as i64, self.axis.first) {
                (0, FirstFrame::PassedAndHidden) => None,
                (frame, _) if frame >= 0 => Some(frame as u64),
                (_, FirstFrame::Repeated) => Some(0),
                _ => None,
            };
            let own = part(unfolded.unwrap_or(0), self.unfold) + part(frame, self.split);
            ((tap as usize, own), unfolded.map(|unfolded| unfolded.div_ceil(self.unfold)))
        };
        (0..self.axis.kernel as i64).map(fall).collect()
    }

    fn keeps_rate(self) -> bool {
        (self.axis.stride, self.unfold, self.split) == (1, 1, 1)
    }

    /// How many of the first frames have recipes of their own.
    fn early_frames(self) -> u64 {
        let (period, step) = self.period();
        let later = |taps: Taps| -> Taps {
            taps.into_iter().map(|(product, input)| (product, input.map(|input| input + step))).collect()
        };
        let repeats = |frame: &u64| later(self.taps(*frame)) == self.taps(frame + period);
        let last = (0..2 * self.axis.kernel * self.unfold * self.split).rev().find(|frame| !repeats(frame));
        last.map_or(0, |last| last + 1)
    }
}

impl Recipes {
    pub fn new(rule: TimeRule) -> Recipes {
        match rule.pairs {
            Pairs::None => Recipes::direct(rule),
            Pairs::Plain | Pairs::Halved => Recipes::paired(rule),
        }
    }

    fn direct(rule: TimeRule) -> Recipes {
        let (early, (period, step)) = (rule.early_frames(), rule.period());
        let (mut slabs, mut biases): (Vec<Slab>, Vec<Vec<Product>>) = (Vec::new(), Vec::new());
        let mut recipe = |frame: u64| {
            let taps = rule.taps(frame);
            if taps.is_empty() {
                return Recipe { is_passed: true, ..recipe_of(&[(0, 0)], 0) };
            }
            let all: Vec<Product> = taps.iter().map(|(product, _)| *product).collect();
            let mut merged: BTreeMap<u64, Vec<Product>> = BTreeMap::new();
            for (product, input) in taps {
                input.into_iter().for_each(|input| merged.entry(input).or_default().push(product));
            }
            let term = |(input, products): (u64, Vec<Product>)| {
                let factors = vec![1.0; products.len()];
                (input, number_of(&mut slabs, Slab { products, factors }))
            };
            let terms: Vec<(u64, u8)> = merged.into_iter().map(term).collect();
            recipe_of(&terms, number_of(&mut biases, all))
        };
        let steady = (early..early + period).map(&mut recipe).collect();
        let mut first: Vec<Recipe> = (1..early).map(&mut recipe).collect();
        if early > 0 {
            first.insert(0, recipe(0));
        }
        Recipes { rule, slabs, biases, early: first, steady, step }
    }

    /// By pairs of frames. Frame 0 is computed directly.
    fn paired(rule: TimeRule) -> Recipes {
        debug_assert!(rule.axis.kernel == 3 && rule.keeps_rate(), "only such frames make pairs");
        let tap = |tap: usize, factor: f64| ((tap, 0), factor);
        let halved = if rule.pairs == Pairs::Halved { 2.0 } else { 1.0 };
        let slab = |taps: &[(Product, f64)], scale: f64| Slab {
            products: taps.iter().map(|(product, _)| *product).collect(),
            factors: taps.iter().map(|(_, factor)| factor * scale).collect(),
        };
        let mut slabs = vec![
            slab(&[tap(0, 0.5), tap(1, 0.5), tap(2, 0.5)], halved),
            slab(&[tap(0, 0.5), tap(1, -0.5), tap(2, 0.5)], halved),
            slab(&[tap(0, 1.0)], halved),
            slab(&[tap(2, -1.0)], halved),
        ];
        let PairSlabs { shared: [a, b], own: [first, second] } = PAIR_SLABS;
        let frame_1 = match rule.axis.first {
            FirstFrame::Repeated => {
                slabs.push(slab(&[tap(0, 1.0), tap(1, 1.0), tap(2, 1.0)], 1.0));
                recipe_of(&[(0, first), (0, a), (1, b)], 0)
            }
            _ => {
                slabs.extend([slab(&[tap(2, 1.0)], 1.0), slab(&[tap(1, 1.0)], 1.0)]);
                recipe_of(&[(0, MIDDLE_TAP), (1, AFTER_PAIRS)], 0)
            }
        };
        Recipes {
            rule,
            slabs,
            biases: vec![(0..3).map(|tap| (tap, 0)).collect()],
            early: vec![recipe_of(&[(0, AFTER_PAIRS)], 0), frame_1],
            steady: vec![recipe_of(&[(0, a), (1, b), (2, second)], 0), recipe_of(&[(1, first), (2, a), (3, b)], 0)],
            step: 2,
        }
    }

    pub fn recipe(&self, frame: u64) -> Recipe {
        match self.early.get(frame as usize) {
            Some(recipe) => *recipe,
            None => {
                let (later, period) = (frame - self.early.len() as u64, self.steady.len() as u64);
                self.steady[(later % period) as usize].later(later / period * self.step)
            }
        }
    }

    /// The oldest input frame that output frame `frame` or a later one reads: no recipe reaches further back than an
    /// earlier one.
    pub fn oldest(&self, frame: u64) -> u64 {
        self.recipe(frame).terms()[0].input
    }

    /// Where the input ends that output frame `frame` reads.
    pub fn input_end(&self, frame: u64) -> u64 {
        self.recipe(frame).terms().last().map_or(0, |term| term.input + 1)
    }

    /// Output frames that `inputs` input frames suffice for.
    pub fn outputs(&self, inputs: u64) -> u64 {
        let TimeRule { axis, unfold, split, .. } = self.rule;
        let convolved = (unfold * inputs).saturating_sub(unfold - 1).div_ceil(axis.stride);
        (split * convolved).saturating_sub(split - 1)
    }

    /// How many of these output frames are sums: all but a first frame that is passed on.
    pub fn computed(&self, frames: &Range<u64>) -> u64 {
        let passed = frames.contains(&0) && self.rule.passes_first();
        frames.end.saturating_sub(frames.start) - u64::from(passed)
    }

    pub fn slabs(&self) -> &[Slab] {
        &self.slabs
    }

    /// The slab of the first frame, if that has one term and no other frame has its slab.
    pub fn first_frame_slab(&self) -> Option<u8> {
        let (first, others) = (self.recipe(0), self.early.iter().skip(1).chain(&self.steady));
        let [RecipeTerm { slab, .. }] = *first.terms() else { return None };
        let is_own = !self.early.is_empty() && others.flat_map(Recipe::terms).all(|term| term.slab != slab);
        (is_own && !first.is_passed).then_some(slab)
    }

    pub fn biases(&self) -> &[Vec<Product>] {
        &self.biases
    }

    /// How many of the first slabs the frames need whose last slab is `slab`.
    pub fn slabs_up_to(&self, slab: u8) -> u64 {
        u64::from(if self.has_pairs() { AFTER_PAIRS.max(slab + 1) } else { slab + 1 })
    }

    pub fn has_pairs(&self) -> bool {
        self.rule.pairs != Pairs::None
    }

    /// Whether input and output have the same frame rate.
    pub fn keeps_rate(&self) -> bool {
        self.rule.keeps_rate()
    }

    /// Whether a frame reads earlier ones of a clip with the same frame rate.
    pub fn is_causal(&self) -> bool {
        self.rule.axis.kernel > 1 && self.keeps_rate()
    }

    /// Products of a frame away from the start of the clip. Frames of a pair share half of theirs.
    pub fn steady_products(&self) -> u64 {
        if self.has_pairs() { 2 } else { self.steady_terms() }
    }

    /// Terms of a frame away from the start of the clip.
    pub fn steady_terms(&self) -> u64 {
        u64::from(self.steady[0].len)
    }

    /// Output frames that read input frames of earlier ones, if every frame reads whole input frames.
    pub fn pending_outputs(&self) -> Option<u64> {
        let pending = (self.rule.axis.kernel - 1).div_ceil(self.rule.axis.stride);
        let is_plain = self.rule.unfold == 1 && self.rule.split == 1 && !self.rule.passes_first();
        (is_plain && pending > 0).then_some(pending)
    }
}

/// `terms`: input frames and their slabs, oldest first.
fn recipe_of(terms: &[(u64, u8)], bias: u8) -> Recipe {
    let mut all = [RecipeTerm::default(); MAX_TERMS];
    all.iter_mut().zip(terms).for_each(|(term, (input, slab))| *term = RecipeTerm { input: *input, slab: *slab });
    Recipe { terms: all, len: terms.len() as u8, bias, is_passed: false }
}

/// The place of an entry in a list, which grows if it is new.
fn number_of<T: PartialEq>(list: &mut Vec<T>, entry: T) -> u8 {
    let at = list.iter().position(|known| *known == entry).unwrap_or_else(|| {
        list.push(entry);
        list.len() - 1
    });
    at as u8
}
