//! `precision=auto`: fp16 where it holds, else bf16. fp16 has an eighth of bf16's error, but some models overflow in
//! it.

use super::settings::Settings;
use crate::backend::{NonFinite, Precision};

/// What a handle has learned about fp16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AutoPrecision {
    #[default]
    Unknown,
    /// Finite inputs gave finite outputs.
    Holds,
    /// Finite inputs did not. The handle computes in bf16.
    Overflows,
}

impl AutoPrecision {
    /// The precision to compute in, where the host leaves it to the library and something is known.
    pub fn of(self, settings: &Settings) -> Option<Precision> {
        settings.precision.or((self == AutoPrecision::Overflows).then_some(Precision::Bf16))
    }

    /// Whether calls may find out more: the host leaves the precision to the library, which computes in `used`.
    pub fn is_open(self, settings: &Settings, used: Precision) -> bool {
        settings.precision.is_none() && used == Precision::Fp16
    }

    /// Whether a call on a host's stream has to wait for its result.
    pub fn waits(self, settings: &Settings, used: Precision) -> bool {
        self == AutoPrecision::Unknown && self.is_open(settings, used)
    }

    /// Whether what a call met means that values overflow in fp16.
    pub fn overflows(self, settings: &Settings, used: Precision, seen: NonFinite) -> bool {
        self.is_open(settings, used) && seen.stored && !seen.loaded
    }

    /// After a call that is not repeated and whose result is known.
    pub fn after(self, seen: NonFinite) -> AutoPrecision {
        match self {
            AutoPrecision::Unknown if seen == NonFinite::default() => AutoPrecision::Holds,
            same => same,
        }
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
        let (auto, unknown) = (node::defaults(), AutoPrecision::Unknown);
        assert!(unknown.overflows(&auto, Precision::Fp16, OVERFLOW));
        assert!(AutoPrecision::Holds.overflows(&auto, Precision::Fp16, OVERFLOW), "a later input may overflow");
        for (used, seen) in [(Precision::Fp16, GIVEN), (Precision::Fp16, FINITE), (Precision::Bf16, OVERFLOW)] {
            assert!(!unknown.overflows(&auto, used, seen), "{used:?} {seen:?}");
        }
        let asked = Settings { precision: Some(Precision::Fp16), ..auto };
        assert!(!unknown.overflows(&asked, Precision::Fp16, OVERFLOW) && !unknown.waits(&asked, Precision::Fp16));
    }

    #[test]
    fn a_handle_learns_once() {
        let auto = node::defaults();
        let waits = |known: AutoPrecision| known.waits(&auto, Precision::Fp16);
        assert!(waits(AutoPrecision::Unknown) && waits(AutoPrecision::Unknown.after(GIVEN)));
        let holds = AutoPrecision::Unknown.after(FINITE);
        assert!(holds == AutoPrecision::Holds && !waits(holds) && holds.of(&auto).is_none());
        assert_eq!(AutoPrecision::Overflows.after(FINITE).of(&auto), Some(Precision::Bf16));
        let fp32 = Settings { precision: Some(Precision::Fp32), ..auto };
        assert_eq!(AutoPrecision::Overflows.of(&fp32), Some(Precision::Fp32), "the host's word counts");
        assert!(!AutoPrecision::Unknown.waits(&node::defaults(), Precision::Fp32), "as on the CPU");
    }
}
