//! How alike two clips are.

use crate::tensor::Frames;

pub struct Quality {
    /// Over all pixels of all frames, in dB; infinite if they are equal.
    pub psnr: f64,
    /// The mean over frames of the structural similarity of luma (Wang et al. 2004: Gaussian window of 11 pixels with
    /// a deviation of 1.5, constants 0.01 and 0.03).
    pub ssim: f64,
}

pub fn compare(a: &Frames, b: &Frames) -> Quality {
    let wide = |frame: &[u8]| frame.iter().map(|value| f32::from(*value)).collect::<Vec<_>>();
    let frames: Vec<_> = (0..a.count()).map(|i| of_frame(&wide(a.frame(i)), &wide(b.frame(i)), a.kind.width)).collect();
    mean(&frames)
}

/// Of one frame of interleaved RGB, from 0 to 255: the mean squared error, and the structural similarity.
pub fn of_frame(a: &[f32], b: &[f32], width: usize) -> (f64, f64) {
    (mean_square(a, b), ssim(&luma(a), &luma(b), width))
}

pub fn mean_square(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(x - y).powi(2)).sum::<f64>() / a.len() as f64
}

pub fn psnr(mean_square: f64) -> f64 {
    10.0 * (255.0f64.powi(2) / mean_square).log10()
}

/// Of a clip, from those of its frames.
pub fn mean(frames: &[(f64, f64)]) -> Quality {
    let count = frames.len() as f64;
    let [square, ssim] =
        [|f: &(f64, f64)| f.0, |f: &(f64, f64)| f.1].map(|of| frames.iter().map(of).sum::<f64>() / count);
    Quality { psnr: psnr(square), ssim }
}

/// Of frames of f32: the squared norm of their difference, and that of the first.
pub fn energies(a: &[u8], b: &[u8]) -> [f64; 2] {
    let values =
        |bytes: &[u8]| bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect::<Vec<_>>();
    let (a, b) = (values(a), values(b));
    [a.iter().zip(&b).map(|(x, y)| (x - y).powi(2)).sum(), a.iter().map(|x| x.powi(2)).sum()]
}

fn luma(rgb: &[f32]) -> Vec<f64> {
    let weighted = |p: &[f32]| 0.299 * f64::from(p[0]) + 0.587 * f64::from(p[1]) + 0.114 * f64::from(p[2]);
    rgb.chunks_exact(3).map(weighted).collect()
}

fn ssim(a: &[f64], b: &[f64], width: usize) -> f64 {
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).collect::<Vec<_>>();
    let planes = [a.to_vec(), b.to_vec(), product(a, a), product(b, b), product(a, b)];
    let [ma, mb, aa, bb, ab] = std::thread::scope(|scope| {
        let blurred = planes.map(|plane| scope.spawn(move || blur(&plane, width)));
        blurred.map(|plane| plane.join().expect("arithmetic does not panic"))
    });
    let (c1, c2) = ((0.01f64 * 255.0).powi(2), (0.03f64 * 255.0).powi(2));
    let at = |i: usize| {
        let (va, vb, covariance) = (aa[i] - ma[i] * ma[i], bb[i] - mb[i] * mb[i], ab[i] - ma[i] * mb[i]);
        let means = (2.0 * ma[i] * mb[i] + c1) / (ma[i] * ma[i] + mb[i] * mb[i] + c1);
        means * (2.0 * covariance + c2) / (va + vb + c2)
    };
    (0..a.len()).map(at).sum::<f64>() / a.len() as f64
}

/// Pixels of the window to each side.
const REACH: usize = 5;

/// Both directions in turn; beyond the border stands the border.
fn blur(plane: &[f64], width: usize) -> Vec<f64> {
    let mut taps: [f64; 2 * REACH + 1] =
        std::array::from_fn(|i| (-(i as f64 - REACH as f64).powi(2) / (2.0 * 1.5f64.powi(2))).exp());
    let sum: f64 = taps.iter().sum();
    taps.iter_mut().for_each(|tap| *tap /= sum);
    let height = plane.len() / width;
    let from = |i: usize, k: usize, count: usize| (i + k).saturating_sub(REACH).min(count - 1);
    let mut rows = Vec::with_capacity(plane.len());
    for row in plane.chunks_exact(width) {
        let wide: Vec<f64> = (0..width + 2 * REACH).map(|x| row[from(x, 0, width)]).collect();
        rows.extend(
            wide.windows(taps.len()).map(|window| window.iter().zip(&taps).map(|(x, tap)| x * tap).sum::<f64>()),
        );
    }
    let mut out = vec![0.0; plane.len()];
    for (y, line) in out.chunks_exact_mut(width).enumerate() {
        for (k, tap) in taps.iter().enumerate() {
            let row = &rows[from(y, k, height) * width..][..width];
            line.iter_mut().zip(row).for_each(|(sum, value)| *sum += tap * value);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_weights::Random;

    /// SSIM as it is defined: one window in two dimensions for each pixel, its mean first, then its variances.
    fn by_definition(a: &[f64], b: &[f64], width: usize) -> f64 {
        let height = a.len() / width;
        let mut total = 0.0;
        for pixel in 0..a.len() {
            let mut window = Vec::new();
            for (dx, dy) in (-5i64..=5).flat_map(|dy| (-5i64..=5).map(move |dx| (dx, dy))) {
                let x = ((pixel % width) as i64 + dx).clamp(0, width as i64 - 1) as usize;
                let y = ((pixel / width) as i64 + dy).clamp(0, height as i64 - 1) as usize;
                let weight = (-((dx * dx + dy * dy) as f64) / 4.5).exp();
                window.push((weight, a[y * width + x], b[y * width + x]));
            }
            let weights: f64 = window.iter().map(|(weight, ..)| weight).sum();
            let mean = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
                window.iter().map(|(weight, x, y)| weight * of(*x, *y)).sum::<f64>() / weights
            };
            let (mx, my) = (mean(&|x, _| x), mean(&|_, y| y));
            let (vx, vy) = (mean(&|x, _| (x - mx).powi(2)), mean(&|_, y| (y - my).powi(2)));
            let covariance = mean(&|x, y| (x - mx) * (y - my));
            let (c1, c2) = (6.5025, 58.5225);
            total += (2.0 * mx * my + c1) * (2.0 * covariance + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2));
        }
        total / a.len() as f64
    }

    /// Waves, and the same with noise.
    fn pictures(width: usize, height: usize, noise: f64) -> [Vec<f64>; 2] {
        let mut random = Random(5);
        let wave = |i: usize| 120.0 + 70.0 * ((i % width) as f64 / 3.0).sin() * ((i / width) as f64 / 4.0).cos();
        let a: Vec<f64> = (0..width * height).map(wave).collect();
        let b = a.iter().map(|x| x + noise * f64::from(random.normal())).collect();
        [a, b]
    }

    #[test]
    fn ssim_is_that_of_its_definition() {
        // Wider and narrower than the window.
        for (width, height) in [(31, 23), (7, 40), (1, 1)] {
            for noise in [0.01, 1.0, 25.0] {
                let [a, b] = pictures(width, height, noise);
                let (fast, slow) = (ssim(&a, &b, width), by_definition(&a, &b, width));
                assert!((fast - slow).abs() < 1e-9, "{width}x{height}, noise {noise}: {fast}, by definition {slow}");
            }
        }
    }

    #[test]
    fn ssim_has_its_known_values() {
        let [a, noisy] = pictures(31, 23, 25.0);
        assert_eq!(ssim(&a, &a, 31), 1.0);
        let (little, much) = (ssim(&a, &pictures(31, 23, 1.0)[1], 31), ssim(&a, &noisy, 31));
        assert!(little > 0.99 && (0.3..0.9).contains(&much), "{little} {much}");
        // Of flat pictures only the means count: 100 and 110.
        let known = (2.0 * 100.0 * 110.0 + 6.5025) / (100.0 * 100.0 + 110.0 * 110.0 + 6.5025);
        let flat = ssim(&[100.0; 900], &[110.0; 900], 30);
        assert!((flat - known).abs() < 1e-12, "{flat}, known {known}");
        let negative: Vec<f64> = a.iter().map(|x| 240.0 - x).collect();
        assert!(ssim(&a, &negative, 31) < 0.0);
    }

    #[test]
    fn psnr_and_energies_are_those_of_their_formulas() {
        let (square, _) = of_frame(&[10.0; 27], &[12.0; 27], 3);
        assert_eq!(square, 4.0);
        assert!((psnr(square) - 42.110).abs() < 1e-3 && psnr(0.0) == f64::INFINITY);
        let bytes = |values: [f32; 2]| values.map(f32::to_le_bytes).concat();
        assert_eq!(energies(&bytes([3.0, 4.0]), &bytes([3.0, 4.5])), [0.25, 25.0]);
    }
}
