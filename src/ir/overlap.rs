//! Whether tensors share memory.

use super::View;

/// Steps of the search. Layouts from slicing, permuting and padding take a few hundred.
const MOST_STEPS: u32 = 1 << 16;

/// One axis, or the same axis of both tensors: adds `stride` times a number from `least` to `most`.
struct SharedAxis {
    stride: i128,
    least: i128,
    most: i128,
}

/// Whether some element of `a` and some element of `b` share a byte. Exact, but `true` after [`MOST_STEPS`].
pub fn share_bytes(a: &View, b: &View) -> bool {
    // Elements share a byte if the distance from a's to b's is above -b.bytes and below a.bytes.
    let (mut low, mut high) = (1 - element(b), element(a) - 1);
    let mut axes: Vec<SharedAxis> = Vec::new();
    for (view, sign) in [(a, -1), (b, 1)] {
        let start = sign * view.frame(0, 0).addr() as i128;
        (low, high) = (low - start, high - start);
        for (dim, stride) in view.shape().dims().into_iter().zip(view.strides()) {
            let (last, step) = (i128::from(dim) - 1, sign * i128::from(stride) * element(view));
            let (least, most) = if step < 0 { (-last, 0) } else { (0, last) };
            match axes.iter_mut().find(|axis| axis.stride == step.abs()) {
                Some(axis) => (axis.least, axis.most) = (axis.least + least, axis.most + most),
                None if step == 0 || last == 0 => {}
                None => axes.push(SharedAxis { stride: step.abs(), least, most }),
            }
        }
    }
    axes.sort_by_key(|axis| -axis.stride);
    reaches(&axes, low, high, &mut { MOST_STEPS })
}

fn element(view: &View) -> i128 {
    i128::from(view.dtype().bytes())
}

/// Whether some sum over the axes lies in `low..=high`. The larger strides leave few choices to try.
fn reaches(axes: &[SharedAxis], low: i128, high: i128, steps: &mut u32) -> bool {
    let Some((axis, rest)) = axes.split_first() else { return low <= 0 && 0 <= high };
    let rest_low: i128 = rest.iter().map(|axis| axis.stride * axis.least).sum();
    let rest_high: i128 = rest.iter().map(|axis| axis.stride * axis.most).sum();
    let first = -(rest_high - low).div_euclid(axis.stride);
    let last = (high - rest_low).div_euclid(axis.stride);
    for n in first.max(axis.least)..=last.min(axis.most) {
        *steps = steps.saturating_sub(1);
        if *steps == 0 || reaches(rest, low - n * axis.stride, high - n * axis.stride, steps) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{DType, TensorDevice};

    fn view(at: usize, dtype: DType, shape: [u64; 5], strides: Option<[i64; 5]>) -> View {
        let data = std::ptr::without_provenance_mut(at);
        View::checked("t", data, dtype, TensorDevice::Cpu, shape.into(), strides, false).unwrap()
    }

    fn f32s(at: usize, shape: [u64; 5], strides: Option<[i64; 5]>) -> View {
        view(at, DType::F32, shape, strides)
    }

    /// Every byte of every element.
    fn bytes(view: &View) -> std::collections::HashSet<usize> {
        let [b, c, t, h, w] = view.shape().dims();
        let mut all = std::collections::HashSet::new();
        for n in 0..b * c * t * h * w {
            let index = [n / (c * t * h * w), n / (t * h * w) % c, n / (h * w) % t, n / w % h, n % w];
            let at: i64 = index.iter().zip(view.strides()).map(|(i, s)| *i as i64 * s).sum();
            let at = view.frame(0, 0).addr().wrapping_add_signed(at as isize * view.dtype().bytes() as isize);
            all.extend(at..at + view.dtype().bytes() as usize);
        }
        all
    }

    #[test]
    fn halves_of_one_buffer_are_disjoint() {
        const SHAPE: [u64; 5] = [2, 16, 3, 4, 5];
        let planes = Some([32 * 60, 60, 20, 5, 1]);
        let channels_last = Some([60 * 32, 1, 20 * 32, 5 * 32, 32]);
        let pairs = Some([16 * 120, 120, 40, 10, 2]);
        for (strides, apart) in [(planes, 16 * 60), (channels_last, 16), (pairs, 1)] {
            let at = |elements: usize| f32s((1 << 20) | (elements * 4), SHAPE, strides);
            assert!(!share_bytes(&at(0), &at(apart)) && !share_bytes(&at(apart), &at(0)), "{strides:?}");
            assert!(share_bytes(&at(0), &at(0)));
            assert!(share_bytes(&at(0), &at(60 * 32)), "the second clip of one is the first of the other");
        }
        let reversed = f32s((1 << 20) + 4 * (16 * 60 + 59), SHAPE, Some([32 * 60, 60, -20, -5, -1]));
        assert!(!share_bytes(&f32s(1 << 20, SHAPE, planes), &reversed));
    }

    #[test]
    fn neighbours_are_disjoint() {
        let shape = [1, 3, 2, 4, 5];
        let video = f32s(4096, shape, None);
        for (at, shared) in [(4096 - 480, false), (4096 - 476, true), (4096 + 476, true), (4096 + 480, false)] {
            assert_eq!(share_bytes(&video, &f32s(at, shape, None)), shared, "{at}");
        }
        assert!(share_bytes(&video, &view(4097 + 478, DType::U8, [1; 5], None)));
    }

    #[test]
    fn the_answer_is_that_of_trying_every_byte() {
        let mut lcg = crate::testing::Lcg(5);
        let mut random = |below: u64| lcg.bits() % below;
        let mut shared = 0;
        for _ in 0..4000 {
            let mut make = || {
                let dtype = DType::ALL[random(5) as usize];
                let shape = [1, 1 + random(3), 1 + random(3), 1 + random(3), 1 + random(3)];
                let strides = std::array::from_fn(|_| random(80) as i64 - 40);
                view((1 << 16) + 8 * random(60) as usize, dtype, shape, Some(strides))
            };
            let (a, b) = (make(), make());
            let expected = !bytes(&a).is_disjoint(&bytes(&b));
            assert_eq!(share_bytes(&a, &b), expected, "{a:?} {b:?}");
            shared += u32::from(expected);
        }
        assert!((400..3600).contains(&shared), "{shared} of both kinds");
    }

    #[test]
    fn large_layouts_are_answered_at_once() {
        // Rows of one and columns of the other interleave: no layout that a slice gives.
        let a = f32s(1 << 40, [2, 3, 1000, 1001, 997], Some([1 << 34, 1 << 31, 2017, 1999, 2]));
        let b = f32s((1 << 40) + 4, [2, 16, 999, 1013, 991], Some([1 << 33, 1 << 30, 2011, 1993, 2]));
        let time = || {
            let started = std::time::Instant::now();
            share_bytes(&a, &b);
            started.elapsed()
        };
        // Other programs may hold the cores: the least counts.
        let least = (0..5).map(|_| time()).min().unwrap();
        assert!(least.as_millis() < 200, "{least:?}");
    }
}
