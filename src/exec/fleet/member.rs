//! One device of a fleet, and what is known of its speed. Must not know other members.

use super::job::PlannedPart;
use crate::error::Error;
use crate::exec::DeviceSession;
use crate::model::Direction;
use crate::report::PlanReport;

pub struct Member {
    pub session: Box<dyn DeviceSession>,
    /// Frames a second by the last plan, for encode and decode; 1 before. Only the ratio to other members counts.
    speeds: [f64; 2],
    /// Measured seconds for each estimated one.
    corrections: [f64; 2],
    /// What it is to compute in the running call, and what it has computed, in so many seconds from the first operation
    /// of each part on.
    pub todo: Vec<PlannedPart>,
    pub done: Vec<PlannedPart>,
    pub seconds: f64,
    /// Why it is left out of the running call.
    failure: Option<Error>,
    /// The same, until the host is told.
    pub news: Option<Error>,
}

/// Whether another device may do what failed with this error.
pub fn is_of_device(error: &Error) -> bool {
    matches!(error, Error::Device(_) | Error::Memory(_))
}

impl Member {
    /// Runs shorter than this say little about a device's speed.
    const LEAST_MEASURED: f64 = 0.05;

    pub fn new(session: Box<dyn DeviceSession>) -> Member {
        Member {
            session,
            speeds: [1.0; 2],
            corrections: [1.0; 2],
            todo: Vec::new(),
            done: Vec::new(),
            seconds: 0.0,
            failure: None,
            news: None,
        }
    }

    /// Whether it takes part in the running call.
    pub fn is_able(&self) -> bool {
        self.failure.is_none()
    }

    pub fn failure(&self) -> Option<Error> {
        self.failure.clone()
    }

    pub fn leave_out(&mut self, why: Error) {
        (self.failure, self.news) = (Some(why.clone()), Some(why));
    }

    /// Before a call: what failed for lack of memory may work now. `all`: also devices that failed themselves.
    pub fn begin(&mut self, all: bool) {
        (self.todo, self.done, self.seconds) = (Vec::new(), Vec::new(), 0.0);
        if all || !matches!(self.failure, Some(Error::Device(_))) {
            (self.failure, self.news) = (None, None);
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

    /// All its parts in the running call.
    pub fn parts(&self) -> impl Iterator<Item = &PlannedPart> {
        self.done.iter().chain(&self.todo)
    }

    /// Bytes of its parts. They run one after the other, in the same memory.
    pub fn most(&self, bytes: fn(&PlanReport) -> u64) -> u64 {
        self.parts().map(|planned| bytes(&planned.plan)).max().unwrap_or(0)
    }

    /// How long these plans will take, by how long others took.
    pub fn expected_seconds<'a>(&self, direction: Direction, parts: impl Iterator<Item = &'a PlannedPart>) -> f64 {
        self.corrections[direction as usize] * estimated_seconds(parts)
    }

    /// The parts that are done, but for the first `before`, took `measured` seconds.
    pub fn learn(&mut self, direction: Direction, before: usize, measured: f64) {
        self.seconds += measured;
        let estimated = estimated_seconds(self.done[before..].iter());
        if measured >= Self::LEAST_MEASURED && estimated > 0.0 {
            self.corrections[direction as usize] = measured / estimated;
        }
    }
}

fn estimated_seconds<'a>(parts: impl Iterator<Item = &'a PlannedPart>) -> f64 {
    parts.map(|planned| planned.plan.seconds).sum()
}
