//! The upsampler multiplied out. A 1x1x1 convolution to 4 or 8 times the channels, the unfolding into space and time,
//! and a causal 3x3x3 convolution become four interleaved convolutions with 2 x 2 taps over the small image.

use std::cmp::Reverse;
use std::sync::OnceLock;

use gemm::Parallelism;

use super::taps::{self, Rounded, WeightAndBias, taps_of};
use crate::error::Result;
use crate::ir::ConvLayout;
use crate::model::causal::{Product, Time};
use crate::{reserve, workers};

/// Rows and columns of the 3x3x3 convolution; offset -1 has index 0.
const KERNEL: usize = 3;
/// Rows and columns of an unfolded pixel, and of the taps of an output phase.
const SIDE: usize = 2;
const PHASES: usize = SIDE * SIDE;
/// Input channels of one matrix product.
const ROWS: usize = 128;
/// Memory for packed operands of a matrix product, per thread.
const PACKING_BYTES: u64 = 8 << 20;
/// Products of at most this many channels are not worth packing.
const PLAIN_CHANNELS: usize = 64;

fn packs(cin: usize, cout: usize) -> bool {
    cin.max(cout) > PLAIN_CHANNELS
}

pub(super) struct Upsampler<'a> {
    upscale: &'a WeightAndBias<'a>,
    conv: &'a WeightAndBias<'a>,
    /// Frames that one frame is unfolded into.
    frames: usize,
    cin: usize,
    cout: usize,
}

/// The kernel offsets in one direction that tap `tap` of output phase `phase` sums, each with the phase of the unfolded
/// pixel that it reads. Kernel offset d of output row 2y + phase reads unfolded row 2y + phase + d, which is row
/// `(phase + d) mod 2` of small row `y + (phase + d) div 2`.
fn offsets(phase: usize, tap: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    (0..KERNEL).filter_map(move |offset| {
        let unfolded = (phase + offset) as isize - 1;
        let small = phase as isize + tap as isize - 1;
        (unfolded.div_euclid(2) == small).then_some((offset, unfolded.rem_euclid(2) as usize))
    })
}

/// The kernel offset that leaves the image in the outermost row (or column) of a phase.
fn outermost(phase: usize) -> usize {
    if phase == 0 { 0 } else { KERNEL - 1 }
}

/// The products of a slab that share an unfolded frame. Their taps are summed first, so that they need one product.
struct Factor {
    /// [kernel row, kernel column, unfolded channel, output channel]
    conv: Vec<f64>,
    /// [unfolded row, unfolded column, unfolded channel, input channel]
    upscale: Vec<f64>,
}

impl<'a> Upsampler<'a> {
    pub fn new(upscale: &'a WeightAndBias<'a>, conv: &'a WeightAndBias<'a>) -> Upsampler<'a> {
        let (cin, cout) = (conv.weight.shape[1] as usize, conv.weight.shape[0] as usize);
        Upsampler { upscale, conv, frames: upscale.bias.elements() / (PHASES * cin), cin, cout }
    }

    fn factor(&self, frame: usize, products: &[Product]) -> Result<Factor> {
        let channels = self.cin;
        let matrix = channels * self.cin;
        let mut conv = reserve::filled("folding", 0.0, KERNEL * KERNEL * channels * self.cout)?;
        taps::sum(&self.conv.weight, &taps_of(products, &[1.0; 3]), &mut conv);
        let mut upscale = reserve::filled("folding", 0.0, PHASES * matrix)?;
        for (phase, into) in upscale.chunks_exact_mut(matrix).enumerate() {
            self.upscale.weight.widen_f64((phase * self.frames + frame) * matrix, into);
        }
        Ok(Factor { conv, upscale })
    }

    pub fn slab<T: Rounded>(&self, products: &[Product], into: &mut [T]) -> Result<()> {
        let (cin, cout) = (self.cin, self.cout);
        let factors: Vec<Factor> = (0..self.frames)
            .map(|frame| products.iter().copied().filter(|(_, z)| *z == frame).collect::<Vec<Product>>())
            .enumerate()
            .filter(|(_, products)| !products.is_empty())
            .map(|(frame, products)| self.factor(frame, &products))
            .collect::<Result<_>>()?;

        // An item is some rows of one tap of one phase. Taps of four offsets take longest, so they come first.
        let mut items = Vec::new();
        for (index, tap) in into.chunks_mut(cin * cout).enumerate() {
            let digit = |place: usize| index >> place & 1;
            let (rows, columns) = (offsets(digit(3), digit(1)), offsets(digit(2), digit(0)));
            let pairs: Vec<((usize, usize), (usize, usize))> =
                rows.flat_map(|row| columns.clone().map(move |column| (row, column))).collect();
            for (chunk, part) in tap.chunks_mut(ROWS * cout).enumerate() {
                items.push((pairs.clone(), chunk * ROWS, part));
            }
        }
        items.sort_by_key(|(pairs, ..)| Reverse(pairs.len()));

        // Never on the calling thread: the matrix product keeps its packing memory per thread.
        workers::for_each(
            workers::threads_for(factors.len() * PHASES * cin * cin * cout).max(1),
            items,
            || vec![0.0; ROWS.min(cin) * cout],
            |exact, (pairs, first, part)| {
                let exact = &mut exact[..part.len()];
                exact.fill(0.0);
                for factor in &factors {
                    for ((kernel_row, row), (kernel_column, column)) in &pairs {
                        let conv = &factor.conv[(kernel_row * KERNEL + kernel_column) * cin * cout..][..cin * cout];
                        let upscale = &factor.upscale[(row * SIDE + column) * cin * cin..][..cin * cin];
                        add_product(upscale, first, conv, cin, cout, exact);
                    }
                }
                part.iter_mut().zip(exact).for_each(|(rounded, exact)| *rounded = T::round(*exact));
            },
        );
        Ok(())
    }

    /// The convolution's bias, plus the 1x1x1's through every kernel offset inside the image: [phase row, phase column,
    /// edge, output channel]. `terms` are those of [`Upsampler::multiply_bias`], computed when first needed.
    pub fn bias(&self, products: &[Product], terms: &OnceLock<Vec<f64>>, into: &mut [f64]) {
        let (cout, frames) = (self.cout, self.frames);
        let mut own = vec![0.0; cout];
        self.conv.bias.widen_f64(0, &mut own);
        let terms = terms.get_or_init(|| self.multiply_bias());
        for (index, into) in into.chunks_exact_mut(cout).enumerate() {
            let (r, s, outer_row, outer_column) = (index >> 3 & 1, index >> 2 & 1, index & 1 == 1, index >> 1 & 1 == 1);
            into.copy_from_slice(&own);
            let rows = (0..SIDE).flat_map(|tap| offsets(r, tap)).filter(|(k, _)| !outer_row || *k != outermost(r));
            for (kernel_row, row) in rows {
                let columns = (0..SIDE).flat_map(|tap| offsets(s, tap));
                for (kernel_column, column) in columns.filter(|(k, _)| !outer_column || *k != outermost(s)) {
                    for (tap, frame) in products {
                        let kernel = (tap * KERNEL + kernel_row) * KERNEL + kernel_column;
                        let unfolded = (row * SIDE + column) * frames + frame;
                        let term = kernel * PHASES * frames + unfolded;
                        let terms = terms.chunks_exact(KERNEL * KERNEL * KERNEL * PHASES * frames);
                        into.iter_mut().zip(terms).for_each(|(sum, terms)| *sum += terms[term]);
                    }
                }
            }
        }
    }

    /// Every tap's weights times every phase and frame of the 1x1x1 bias: [output channel, tap, phase and frame].
    fn multiply_bias(&self) -> Vec<f64> {
        const TAPS: usize = KERNEL * KERNEL * KERNEL;
        let (cin, parts) = (self.cin, PHASES * self.frames);
        let mut stored = vec![0.0; parts * cin];
        self.upscale.bias.widen_f64(0, &mut stored);
        // Channels outermost, so that the innermost loop runs over phases and frames.
        let bias: Vec<f64> = (0..cin * parts).map(|at| stored[at % parts * cin + at / parts]).collect();

        let mut terms = vec![0.0; self.cout * TAPS * parts];
        let items: Vec<(usize, &mut [f64])> = terms.chunks_exact_mut(TAPS * parts).enumerate().collect();
        workers::for_each(
            workers::threads_for(cin * self.cout * TAPS),
            items,
            || vec![0.0; cin * TAPS],
            |weights, (channel, sums)| {
                self.conv.weight.widen_f64(channel * cin * TAPS, weights);
                for (weights, bias) in weights.chunks_exact(TAPS).zip(bias.chunks_exact(parts)) {
                    for (weight, sums) in weights.iter().zip(sums.chunks_exact_mut(parts)) {
                        sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += weight * bias);
                    }
                }
            },
        );
        terms
    }
}

/// Adds rows `first..` of the product of `upscale`, transposed, and `conv`: [input channel, output channel].
fn add_product(upscale: &[f64], first: usize, conv: &[f64], cin: usize, cout: usize, into: &mut [f64]) {
    let rows = into.len() / cout;
    assert!(upscale.len() == cin * cin && conv.len() == cin * cout);
    assert!(first + rows <= cin && into.len() == rows * cout);
    if !packs(cin, cout) {
        for (upscale, conv) in upscale.chunks_exact(cin).zip(conv.chunks_exact(cout)) {
            for (factor, into) in upscale[first..].iter().zip(into.chunks_exact_mut(cout)) {
                into.iter_mut().zip(conv).for_each(|(sum, conv)| *sum += factor * conv);
            }
        }
        return;
    }
    // SAFETY: by the asserts, these exist for m < cin, i < rows and o < cout: element (m, i) of `upscale`, at `m * cin
    // + first + i`; (m, o) of `conv`, at `m * cout + o`; (i, o) of `into`, at `i * cout + o`. `into` is borrowed
    // exclusively, so it shares no memory with the other two.
    unsafe {
        gemm::gemm(
            rows,
            cout,
            cin,
            into.as_mut_ptr(),
            1,
            cout as isize,
            true,
            upscale.as_ptr().add(first),
            cin as isize,
            1,
            conv.as_ptr(),
            1,
            cout as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

pub(super) fn transient_bytes(layout: &ConvLayout, time: Time, threads: u64) -> u64 {
    let (cin, cout) = (layout.cin, layout.cout);
    let frames = if time == Time::Double { 2 } else { 1 };
    let factor = 8 * (9 * cin * cout + 4 * cin * cin);
    let bias_terms = 8 * (27 * 4 * frames * cout + 8 * frames * cin);
    let packing = if packs(cin as usize, cout as usize) { PACKING_BYTES } else { 0 };
    let products = threads * (8 * cout * cin.min(ROWS as u64) + packing);
    let bias_rows = threads * 8 * 27 * cin;
    let items = 128 * 16 * cin.div_ceil(ROWS as u64) * 2;
    frames * factor + bias_terms + products.max(taps::transient_bytes(cin, threads)) + bias_rows + items
}
