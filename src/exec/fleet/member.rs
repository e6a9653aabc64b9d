//! One device of a fleet, and what is known of its speed. Must not know other members.

use std::thread::{Builder, scope};

use super::divide::Part;
use crate::error::{Error, Result};
use crate::exec::DeviceSession;
use crate::float_mode;
use crate::model::Direction;
use crate::report::PlanReport;

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
    /// Whether its device failed, so that later calls do without it too.
    lost: bool,
}

/// Whether another device may do what failed with this error.
pub fn is_of_device(error: &Error) -> bool {
    matches!(error, Error::Device(_) | Error::Memory(_))
}

impl Member {
    /// Runs shorter than this say little about a device's speed.
    const LEAST_MEASURED: f64 = 0.05;

    pub fn new(session: Box<dyn DeviceSession>) -> Member {
        Member { session, speeds: [1.0; 2], corrections: [1.0; 2], failure: None, told: false, lost: false }
    }

    /// Whether it takes part in the running call.
    pub fn is_able(&self) -> bool {
        self.failure.is_none()
    }

    pub fn failure(&self) -> Option<Error> {
        self.failure.clone()
    }

    pub fn leave_out(&mut self, why: Error) {
        self.lost |= matches!(why, Error::Device(_));
        (self.failure, self.told) = (Some(why), false);
    }

    /// Why it is left out, once.
    pub fn news(&mut self) -> Option<Error> {
        let failure = self.failure.as_ref().filter(|_| !self.told).cloned();
        self.told |= failure.is_some();
        failure
    }

    /// Before a call: what failed for lack of memory may work now. `all`: also lost devices.
    pub fn try_again(&mut self, all: bool) {
        if all || !self.lost {
            (self.failure, self.told, self.lost) = (None, false, false);
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
    pub fn expected_seconds(&self, direction: Direction, parts: &[(Part, PlanReport)]) -> f64 {
        self.corrections[direction as usize] * parts.iter().map(|(_, plan)| plan.seconds).sum::<f64>()
    }

    /// A run that was estimated to take so long took `measured` seconds.
    pub fn learn(&mut self, direction: Direction, estimated: f64, measured: f64) {
        if measured >= Self::LEAST_MEASURED && estimated > 0.0 {
            self.corrections[direction as usize] = measured / estimated;
        }
    }
}

/// Runs `work` on each item at the same time, each on its own thread, and `meanwhile` on the calling one.
pub fn at_once<T: Send, R: Send>(
    items: Vec<T>,
    work: impl Fn(T) -> Result<R> + Sync,
    meanwhile: impl FnOnce(),
) -> Vec<Result<R>> {
    let work = &work;
    scope(|in_scope| {
        let start = |item| {
            let on_thread = move || {
                float_mode::set_default();
                work(item)
            };
            Builder::new().spawn_scoped(in_scope, on_thread)
        };
        let started: Vec<_> = items.into_iter().map(start).collect();
        meanwhile();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<R>>>| {
            let thread = thread.map_err(|why| Error::Memory(format!("a thread for a device did not start: {why}")))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        started.into_iter().map(join).collect()
    })
}
