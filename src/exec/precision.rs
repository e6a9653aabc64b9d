//! `precision=auto`: fp16 where it holds, else bf16. fp16 has an eighth of bf16's error, but some models overflow in
//! it.

use super::settings::Settings;
use crate::backend::{NonFinite, Precision};
use crate::model::Direction;

/// What a handle has learned about fp16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AutoPrecision {
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

    /// Whether calls may find out more: the host leaves the precision to the library, which computes in `used`.
    pub fn is_open(self, settings: &Settings, used: Precision) -> bool {
        settings.precision.is_none() && used == Precision::Fp16
    }

    /// Whether a call on a host's stream has to wait for its result.
    pub fn waits(self, direction: Direction, settings: &Settings, used: Precision) -> bool {
        !self.holds[direction as usize] && self.is_open(settings, used)
    }

    /// Whether what a call met means that values overflow in fp16.
    pub fn is_overflow(self, settings: &Settings, used: Precision, seen: NonFinite) -> bool {
        self.is_open(settings, used) && seen.stored && !seen.loaded
    }

    /// After a call whose result is known. Other precisions say nothing about fp16.
    pub fn learn(&mut self, direction: Direction, settings: &Settings, used: Precision, seen: NonFinite) {
        self.holds[direction as usize] |= self.is_open(settings, used) && seen == NonFinite::default();
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
        let (auto, mut known) = (node::defaults(), AutoPrecision::default());
        assert!(known.is_overflow(&auto, Precision::Fp16, OVERFLOW));
        for (used, seen) in [(Precision::Fp16, GIVEN), (Precision::Fp16, FINITE), (Precision::Bf16, OVERFLOW)] {
            assert!(!known.is_overflow(&auto, used, seen), "{used:?} {seen:?}");
        }
        let asked = Settings { precision: Some(Precision::Fp16), ..auto.clone() };
        assert!(!known.is_overflow(&asked, Precision::Fp16, OVERFLOW));
        assert!(!known.waits(Direction::Decode, &asked, Precision::Fp16));
        known.learn(Direction::Decode, &auto, Precision::Fp16, FINITE);
        assert!(known.is_overflow(&auto, Precision::Fp16, OVERFLOW), "a later input may overflow");
    }

    #[test]
    fn a_handle_learns_once_for_each_direction() {
        let (auto, mut known) = (node::defaults(), AutoPrecision::default());
        let waits = |known: AutoPrecision| Direction::ALL.map(|d| known.waits(d, &auto, Precision::Fp16));
        assert_eq!(waits(known), [true, true]);
        known.learn(Direction::Encode, &auto, Precision::Fp16, GIVEN);
        assert_eq!(waits(known), [true, true], "an input that is not finite says nothing");
        let fp32 = Settings { precision: Some(Precision::Fp32), ..node::defaults() };
        known.learn(Direction::Encode, &fp32, Precision::Fp32, FINITE);
        assert_eq!(waits(known), [true, true], "fp32 says nothing about fp16");
        known.learn(Direction::Encode, &auto, Precision::Fp16, FINITE);
        assert_eq!(waits(known), [false, true], "the decoder may overflow where the encoder does not");
        known.learn(Direction::Decode, &auto, Precision::Fp16, FINITE);
        assert!(waits(known) == [false, false] && known.of(&auto).is_none());
        known.overflows = true;
        assert_eq!(known.of(&auto), Some(Precision::Bf16));
        assert_eq!(known.of(&fp32), Some(Precision::Fp32), "the host's word counts");
        assert!(!AutoPrecision::default().waits(Direction::Decode, &auto, Precision::Fp32), "as on the CPU");
    }
}
