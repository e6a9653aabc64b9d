//! What tests of several modules share.

/// A linear congruential generator: the same numbers in every run.
pub struct Lcg(pub u64);

impl Lcg {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Between -1 and 1.
    pub fn next(&mut self) -> f32 {
        (self.bits() >> 7) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn fill(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}
