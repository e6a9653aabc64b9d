//! Normal noise as a function of seed and position: Philox 4x32 with 10 rounds, then Box-Muller.

/// The position of a sample in a clip.
#[derive(Debug, Clone, Copy)]
pub(super) struct SamplePosition {
    pub batch: u64,
    pub frame: u64,
    pub channel: u64,
    pub y: u64,
    pub x: u64,
}

/// A standard normal deviate. Philox key: the seed, low word first. Counter: x, y, the frame's index in the clip (low
/// word), and channel + 2^16 * batch (wrapping). The first two words w0 and w1 give, in f64 and rounded to f32 at the
/// end, `sqrt(-2 ln((w0 + 1) / 2^32)) * cos(2 pi w1 / 2^32)`.
pub(super) fn normal(seed: u64, at: SamplePosition) -> f32 {
    const WORD: f64 = 4_294_967_296.0;
    let last = (at.channel as u32).wrapping_add((at.batch as u32) << 16);
    let [a, b, ..] = philox([at.x as u32, at.y as u32, at.frame as u32, last], [seed as u32, (seed >> 32) as u32]);
    let radius = (-2.0 * ((f64::from(a) + 1.0) / WORD).ln()).sqrt();
    (radius * (std::f64::consts::TAU * (f64::from(b) / WORD)).cos()) as f32
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (a, b) = (0xD251_1F53 * u64::from(counter[0]), 0xCD9E_8D57 * u64::from(counter[2]));
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_its_published_vectors() {
        // kat_vectors of Random123.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let expected = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), expected);
    }

    #[test]
    fn normals_are_normal() {
        let mut moments = [0.0f64; 4];
        let n = 200_000;
        for i in 0..n {
            let v = f64::from(normal(
                7,
                SamplePosition { batch: 0, frame: 3, channel: i % 16, y: i / 1600, x: i / 16 % 100 },
            ));
            for (power, moment) in moments.iter_mut().enumerate() {
                *moment += v.powi(power as i32 + 1) / n as f64;
            }
        }
        for (moment, (expected, within)) in moments.iter().zip([(0.0, 0.01), (1.0, 0.02), (0.0, 0.04), (3.0, 0.1)]) {
            assert!((moment - expected).abs() < within, "{moments:?}");
        }
    }
}
