//! `precision=auto`: fp16 where it holds, else bf16. fp16 has an eighth of bf16's error, but some models overflow in
//! it.

use super::settings::Settings;
use crate::backend::{NonFinite, Precision};
use crate::model::Direction;

/// What a handle has learned about fp16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AutoPrecision {
    /// Whether calls may find out more: the host leaves the precision to the library, which computes in fp16.
    pub is_open: bool,
    /// Finite inputs did not give finite outputs. The handle computes in bf16.
    pub overflows: bool,
    /// By direction, finite inputs gave finite outputs. Often the encoder holds and the decoder does not.
    holds: [bool; 2],
}

impl AutoPrecision {
    /// The precision to compute in, where the host leaves it to the library and something is known.
    pub fn of(self, settings: &Settings) -> Option<Precision> {
        settings.precision.or(self.overflows.then_some(Precision::Bf16))
    }

    /// The same under these settings, with a backend that computes in `used`.
    pub fn with(self, settings: &Settings, used: Precision) -> AutoPrecision {
        AutoPrecision { is_open: settings.precision.is_none() && used == Precision::Fp16, ..self }
    }

    /// Whether a call on a host's stream has to wait for its result.
    pub fn waits(self, direction: Direction) -> bool {
        self.is_open && !self.holds[direction as usize]
    }

    /// Whether what a call met means that values overflow in fp16.
    pub fn is_overflow(self, seen: NonFinite) -> bool {
        self.is_open && seen.stored && !seen.loaded
    }

    /// After a call whose result is known. Other precisions say nothing about fp16.
    pub fn learn(&mut self, direction: Direction, seen: NonFinite) {
        self.holds[direction as usize] |= self.is_open && seen == NonFinite::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node;

    const OVERFLOW: NonFinite = NonFinite { loaded: false, stored: true };
    const GIVEN: NonFinite = NonFinite { loaded: true, stored: true };
    const FINITE: NonFinite = NonFinite { loaded: false, stored: false };

    #[test]
    fn only_auto_in_fp16_is_left_and_only_by_its_own_overflow() {
        let auto = node::defaults();
        let [mut known, bf16] =
            [Precision::Fp16, Precision::Bf16].map(|used| AutoPrecision::default().with(&auto, used));
        assert!(known.is_overflow(OVERFLOW));
        for (known, seen) in [(known, GIVEN), (known, FINITE), (bf16, OVERFLOW)] {
            assert!(!known.is_overflow(seen), "{known:?} {seen:?}");
        }
        let settings = Settings { precision: Some(Precision::Fp16), ..auto };
        let asked = known.with(&settings, Precision::Fp16);
        assert!(!asked.is_overflow(OVERFLOW) && !asked.waits(Direction::Decode));
        known.learn(Direction::Decode, FINITE);
        assert!(known.is_overflow(OVERFLOW), "a later input may overflow");
    }

    #[test]
    fn a_handle_learns_once_for_each_direction() {
        let auto = node::defaults();
        let mut known = AutoPrecision::default().with(&auto, Precision::Fp16);
        let waits = |known: AutoPrecision| Direction::ALL.map(|d| known.waits(d));
        assert_eq!(waits(known), [true, true]);
        known.learn(Direction::Encode, GIVEN);
        assert_eq!(waits(known), [true, true], "an input that is not finite says nothing");
        let fp32 = Settings { precision: Some(Precision::Fp32), ..node::defaults() };
        let mut in_fp32 = known.with(&fp32, Precision::Fp32);
        in_fp32.learn(Direction::Encode, FINITE);
        assert_eq!(waits(in_fp32.with(&auto, Precision::Fp16)), [true, true], "fp32 says nothing about fp16");
        known.learn(Direction::Encode, FINITE);
        assert_eq!(waits(known), [false, true], "the decoder may overflow where the encoder does not");
        known.learn(Direction::Decode, FINITE);
        assert!(waits(known) == [false, false] && known.of(&auto).is_none());
        known.overflows = true;
        assert_eq!(known.of(&auto), Some(Precision::Bf16));
        assert_eq!(known.of(&fp32), Some(Precision::Fp32), "the host's word counts");
        let on_cpu = AutoPrecision::default().with(&auto, Precision::Fp32);
        assert!(!on_cpu.waits(Direction::Decode), "as on the CPU");
    }
}
