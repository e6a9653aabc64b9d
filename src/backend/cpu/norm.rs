//! What happens to a row of sums while it is still in the first-level cache: bias, residual, and its part in the
//! statistics that the next norm needs.
//!
//! Statistics are gathered for each channel of an area, row by row, and put together for the whole frame when all areas
//! are done; always in the same order, whoever computed them.

use super::geometry::Geometry;
use super::kernel::PANEL;
use super::pack;
use super::simd::{Op, Simd};

const EPSILON: f64 = 1e-6;

/// Mean and sum of squared differences from it, for each channel of a panel. Lives in the scratch of the operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Moments {
    mean: [f64; PANEL],
    square: [f64; PANEL],
}

impl Moments {
    pub const BYTES: u64 = size_of::<Moments>() as u64;

    /// Adds one row of `pixels` pixels to `rows` rows of as many.
    fn add(&mut self, row: &Sums, channels: usize, pixels: usize, rows: usize) {
        let n = pixels as f64;
        let (share, weight) = (1.0 / (rows + 1) as f64, n * rows as f64 / (rows + 1) as f64);
        for c in 0..channels {
            let (centre, d) = (f64::from(row.centre[c]), f64::from(row.difference[c]));
            let mean = centre + d / n;
            let square = f64::from(row.square[c]) - d * d / n;
            if rows == 0 {
                (self.mean[c], self.square[c]) = (mean, square);
            } else {
                let delta = mean - self.mean[c];
                self.mean[c] += delta * share;
                self.square[c] += square + delta * delta * weight;
            }
        }
    }
}

/// Of one row, about a centre near its mean: sums of the differences and of their squares.
struct Sums {
    centre: [f32; PANEL],
    difference: [f32; PANEL],
    square: [f32; PANEL],
}

/// One panel's part of a row of the output.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub out: *mut f32,
    /// From a pixel to the next.
    pub step: usize,
    pub pixels: usize,
    pub channels: usize,
    pub bias: *const f32,
    /// A pixel in an outer column has a bias of its own.
    pub edge: Option<(usize, *const f32)>,
    /// Laid out as `out`, or null.
    pub residual: *const f32,
}

impl Row {
    /// Finishes the row. It becomes row number `rows` of `moments`, if not null.
    ///
    /// # Safety
    /// The pointers are good for the row, and the processor has `S`.
    pub unsafe fn finish<S: Simd>(&self, moments: *mut Moments, rows: usize) {
        // SAFETY: as the caller vouches.
        unsafe {
            if moments.is_null() {
                S::enter(Finish { row: self, sums: None });
            } else {
                let mut sums = Sums { centre: [0.0; PANEL], difference: [0.0; PANEL], square: [0.0; PANEL] };
                S::enter(Finish { row: self, sums: Some(&mut sums) });
                (*moments).add(&sums, self.channels, self.pixels, rows);
            }
        }
    }
}

struct Finish<'a> {
    row: &'a Row,
    sums: Option<&'a mut Sums>,
}

impl Op for Finish<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Row { out, step, pixels, channels, bias, edge, residual } = *self.row;
        let whole = channels / S::LANES * S::LANES;
        let mut sums = self.sums;
        let n = pixels as f32;
        for c in (0..whole).step_by(S::LANES) {
            // SAFETY: whoever made the row vouches for its pixels and channels.
            unsafe {
                let (inner, out) = (S::load(bias.add(c)), out.add(c));
                let mut sum = S::splat(0.0);
                for pixel in 0..pixels {
                    let add = match edge {
                        Some((at, bias)) if at == pixel => S::load(bias.add(c)),
                        _ => inner,
                    };
                    let mut v = S::add(S::load(out.add(pixel * step)), add);
                    if !residual.is_null() {
                        v = S::add(v, S::load(residual.add(pixel * step + c)));
                    }
                    S::store(out.add(pixel * step), v);
                    sum = S::add(sum, v);
                }
                if let Some(sums) = sums.as_deref_mut() {
                    let centre = S::mul(sum, S::splat(1.0 / n));
                    let (mut difference, mut square) = (S::splat(0.0), S::splat(0.0));
                    for pixel in 0..pixels {
                        let d = S::sub(S::load(out.add(pixel * step)), centre);
                        difference = S::add(difference, d);
                        square = S::fma(d, d, square);
                    }
                    S::store(sums.centre.as_mut_ptr().add(c), centre);
                    S::store(sums.difference.as_mut_ptr().add(c), difference);
                    S::store(sums.square.as_mut_ptr().add(c), square);
                }
            }
        }
        for c in whole..channels {
            // SAFETY: as above.
            unsafe {
                let mut sum = 0.0;
                for pixel in 0..pixels {
                    let add = match edge {
                        Some((at, bias)) if at == pixel => *bias.add(c),
                        _ => *bias.add(c),
                    };
                    let v = out.add(pixel * step + c);
                    *v += add;
                    if !residual.is_null() {
                        *v += *residual.add(pixel * step + c);
                    }
                    sum += *v;
                }
                if let Some(sums) = sums.as_deref_mut() {
                    let centre = sum * (1.0 / n);
                    let (mut difference, mut square) = (0.0, 0.0);
                    for pixel in 0..pixels {
                        let d = *out.add(pixel * step + c) - centre;
                        difference += d;
                        square += d * d;
                    }
                    (sums.centre[c], sums.difference[c], sums.square[c]) = (centre, difference, square);
                }
            }
        }
    }
}

/// Mean and reciprocal deviation of each group, from the moments of all areas, phases and panels (in this order) of
/// a frame.
pub(super) fn conclude(moments: &[Moments], geometry: &Geometry, cout: usize, into: &mut [f32]) {
    let groups = into.len() / 2;
    let (panels, per_group) = (pack::panels(cout), cout / groups);
    let phases = geometry.spread * geometry.spread;
    let total = (geometry.height * geometry.width * phases * per_group) as f64;
    for (group, into) in into.chunks_exact_mut(2).enumerate() {
        let channels = group * per_group..(group + 1) * per_group;
        let all = |f: &mut dyn FnMut(f64, f64, f64)| {
            for area in 0..geometry.areas() {
                let size = geometry.area(area);
                let n = (size.height * size.width) as f64;
                for phase in 0..phases {
                    for c in channels.clone() {
                        let of = &moments[(area * phases + phase) * panels + c / PANEL];
                        f(n, of.mean[c % PANEL], of.square[c % PANEL]);
                    }
                }
            }
        };
        let mut sum = 0.0;
        all(&mut |n, mean, _| sum += n * mean);
        let mean = sum / total;
        let mut square = 0.0;
        all(&mut |n, part, within| square += within + n * (part - mean) * (part - mean));
        into[0] = mean as f32;
        into[1] = (1.0 / (square / total + EPSILON).sqrt()) as f32;
    }
}
