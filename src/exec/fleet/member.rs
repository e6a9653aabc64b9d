//! One device of a fleet, and what is known of its speed. Must not know other members.

use super::job::PlannedPart;
use crate::error::Error;
use crate::exec::DeviceSession;
use crate::model::Direction;

pub struct Member {
    pub session: Box<dyn DeviceSession>,
    /// Frames a second by the last plan, for encode and decode; 1 before. Only the ratio to other members counts.
    speeds: [f64; 2],
    /// Measured seconds for each estimated one.
    corrections: [f64; 2],
    /// Why it is left out of the running call.
    failure: Option<Error>,
    /// Whether the host knows that.
    told: bool,
}

/// Whether another device may do what failed with this error.
pub fn is_of_device(error: &Error) -> bool {
    matches!(error, Error::Device(_) | Error::Memory(_))
}

impl Member {
    /// Runs shorter than this say little about a device's speed.
    const LEAST_MEASURED: f64 = 0.05;

    pub fn new(session: Box<dyn DeviceSession>) -> Member {
        Member { session, speeds: [1.0; 2], corrections: [1.0; 2], failure: None, told: false }
    }

    /// Whether it takes part in the running call.
    pub fn is_able(&self) -> bool {
        self.failure.is_none()
    }

    pub fn failure(&self) -> Option<Error> {
        self.failure.clone()
    }

    pub fn leave_out(&mut self, why: Error) {
        (self.failure, self.told) = (Some(why), false);
    }

    /// Why it is left out, once.
    pub fn news(&mut self) -> Option<Error> {
        let failure = self.failure.as_ref().filter(|_| !self.told).cloned();
        self.told |= failure.is_some();
        failure
    }

    /// Before a call: what failed for lack of memory may work now. `all`: also devices that failed themselves.
    pub fn try_again(&mut self, all: bool) {
        if all || !matches!(self.failure, Some(Error::Device(_))) {
            (self.failure, self.told) = (None, false);
        }
    }

    /// 0 if it takes no part.
    pub fn speed(&self, direction: Direction) -> f64 {
        if self.is_able() { self.speeds[direction as usize] } else { 0.0 }
    }

    pub fn set_speed(&mut self, direction: Direction, speed: f64) {
        if speed > 0.0 {
            self.speeds[direction as usize] = speed;
        }
    }

    /// How long these plans will take, by how long others took.
    pub fn expected_seconds(&self, direction: Direction, parts: &[PlannedPart]) -> f64 {
        self.corrections[direction as usize] * estimated_seconds(parts)
    }

    /// These parts took `measured` seconds.
    pub fn learn(&mut self, direction: Direction, parts: &[PlannedPart], measured: f64) {
        let estimated = estimated_seconds(parts);
        if measured >= Self::LEAST_MEASURED && estimated > 0.0 {
            self.corrections[direction as usize] = measured / estimated;
        }
    }
}

fn estimated_seconds(parts: &[PlannedPart]) -> f64 {
    parts.iter().map(|planned| planned.plan.seconds).sum()
}
