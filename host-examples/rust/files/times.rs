//! When frames are shown. A clip of one rate that begins at zero needs no times; those of every other are kept.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::units::{Rate, counted};

/// The times of a clip's frames, from the start of its file on. They are known as far as frames were read.
#[derive(Debug, Clone)]
pub struct Times {
    /// Ticks a second.
    pub ticks: Rate,
    list: Arc<Mutex<Vec<i64>>>,
    /// Whether the rate is variable.
    uneven: bool,
}

impl Times {
    pub fn new(ticks: Rate, uneven: bool) -> Times {
        Times { ticks, list: Arc::default(), uneven }
    }

    /// All of a clip, in order.
    pub fn of(ticks: Rate, list: Vec<i64>) -> Times {
        let steps = || list.windows(2).map(|pair| pair[1] - pair[0]);
        let uneven = steps().min() != steps().max();
        Times { ticks, list: Arc::new(Mutex::new(list)), uneven }
    }

    fn list(&self) -> MutexGuard<'_, Vec<i64>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds that of the next frame. Files must not hold two frames of one time, so a frame that is late by error comes
    /// a tick after the last.
    pub fn push(&self, time: i64) {
        let mut list = self.list();
        let least = list.last().map_or(i64::MIN, |last| last + 1);
        list.push(time.max(least));
    }

    /// Of a frame that was read.
    pub fn get(&self, frame: usize) -> Option<i64> {
        self.list().get(frame).copied()
    }

    /// Of frames that were read.
    pub fn count(&self) -> usize {
        self.list().len()
    }

    pub fn all(&self) -> Vec<i64> {
        self.list().clone()
    }

    /// Those from a frame on, as a clip of its own that begins at zero.
    pub fn from(&self, frame: usize) -> Times {
        let list = self.all();
        let rest = list.get(frame..).unwrap_or_default();
        Times::of(self.ticks, rest.iter().map(|time| time - rest[0]).collect())
    }

    /// Seconds at which the clip begins, if that is not at zero.
    pub fn start(&self) -> Option<f64> {
        self.get(0).filter(|time| *time != 0).map(|time| time as f64 / self.ticks.per_second())
    }

    /// Whether frames come at this rate from zero on, as far as they were read.
    pub fn are_plain(&self, rate: Rate) -> bool {
        self.ticks == rate && self.all().iter().enumerate().all(|(frame, time)| frame as i64 == *time)
    }

    /// Known before frames are read.
    pub fn are_uneven(&self) -> bool {
        self.uneven
    }

    /// The frame of a clip with a constant rate that is shown at this time, if the clip begins at `start`.
    pub fn slot(&self, time: i64, start: i64, rate: Rate) -> i64 {
        rescaled(time - start, self.ticks, rate)
    }
}

/// Whether times of a file can be counted with: years in nanoseconds, whose sums do not overflow.
pub fn is_time(ticks: i64) -> bool {
    ticks.unsigned_abs() < 1 << 61
}

/// Ticks of one clock in those of another, to the nearest.
pub fn rescaled(ticks: i64, from: Rate, to: Rate) -> i64 {
    let wide = |n: u64| i128::from(n);
    let (above, below) = (wide(from.seconds) * wide(to.frames), wide(from.frames) * wide(to.seconds));
    let exact = i128::from(ticks) * above;
    i64::try_from((2 * exact + below).div_euclid(2 * below)).unwrap_or(i64::MAX)
}

/// Turns the times of a file into those of a clip.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Ticks a second of the file.
    pub from: Rate,
    /// Ticks a second of the clip.
    pub to: Rate,
    /// A constant rate and the time of the first frame, in ticks of the file. Files round times, which this undoes.
    pub constant: Option<(Rate, i64)>,
}

impl Clock {
    /// The fewest ticks a second that a start other than zero gets.
    const FINE: u64 = 90_000;

    /// Of a clip whose frames come at `rate` from `start` on, if it is constant.
    pub fn new(from: Rate, constant: Option<(Rate, i64)>) -> Clock {
        let to = match constant {
            None => from,
            // Rounding may have moved the first frame by a tick.
            Some((rate, start)) if rescaled(start, from, Clock::thousandths()) == 0 => rate,
            Some((rate, _)) => fine(rate),
        };
        Clock { from, to, constant }
    }

    fn thousandths() -> Rate {
        Rate { frames: 1000, seconds: 1 }
    }

    pub fn tell(&self, time: i64) -> i64 {
        match self.constant {
            Some((rate, start)) => self.of_frame(rescaled(time - start, self.from, rate)),
            None => rescaled(time, self.from, self.to),
        }
    }

    /// Of a frame of a clip with a constant rate.
    pub fn of_frame(&self, frame: i64) -> i64 {
        let (rate, start) = self.constant.unwrap_or((self.to, 0));
        // Where the clip begins at zero, but for rounding, ticks are frames.
        let first = if self.to == rate { 0 } else { rescaled(start, self.from, self.to) };
        first + rescaled(frame, rate, self.to)
    }
}

/// A multiple of the rate's own ticks, at least `Clock::FINE`, so that both frames and any start are exact.
fn fine(rate: Rate) -> Rate {
    Rate { frames: rate.frames * Clock::FINE.div_ceil(rate.frames), seconds: 1 }
}

/// Frames that were shown twice or never, because an output knows one rate only.
#[derive(Debug, Default)]
pub struct Changes {
    duplicated: AtomicU64,
    dropped: AtomicU64,
}

impl Changes {
    /// Notes how often a frame is shown.
    pub fn note(&self, shown: u64) {
        self.duplicated.fetch_add(shown.saturating_sub(1), Ordering::Relaxed);
        self.dropped.fetch_add(u64::from(shown == 0), Ordering::Relaxed);
    }

    /// "3 frames duplicated and 1 frame dropped to keep to 24/1 frames a second"
    pub fn told(&self, rate: Rate) -> Option<String> {
        let [duplicated, dropped] = [&self.duplicated, &self.dropped].map(|count| count.load(Ordering::Relaxed));
        (duplicated + dropped > 0).then(|| {
            format!(
                "{} duplicated and {dropped} dropped to keep to {rate} frames a second",
                counted(duplicated, "frame")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECONDS: Rate = Rate { frames: 1000, seconds: 1 };

    #[test]
    fn a_constant_rate_is_exact_although_the_file_rounds() {
        let rate = Rate { frames: 30000, seconds: 1001 };
        let rounded: Vec<i64> = (0..100_000).map(|frame| rescaled(frame, rate, MILLISECONDS)).collect();
        let plain = Clock::new(MILLISECONDS, Some((rate, 0)));
        assert!(plain.to == rate && rounded.iter().enumerate().all(|(frame, time)| plain.tell(*time) == frame as i64));
        let late = Clock::new(MILLISECONDS, Some((rate, 500)));
        assert_eq!(late.to, Rate { frames: 90000, seconds: 1 });
        let told: Vec<i64> = rounded.iter().map(|time| late.tell(time + 500)).collect();
        assert!(told.iter().enumerate().all(|(frame, time)| *time == 45_000 + 3003 * frame as i64));
    }

    #[test]
    fn times_rise() {
        let times = Times::new(MILLISECONDS, true);
        [0, 10, 10, 5, 40].into_iter().for_each(|time| times.push(time));
        assert_eq!(times.all(), [0, 10, 11, 12, 40]);
        assert_eq!(times.from(3).all(), [0, 28]);
        assert_eq!(rescaled(-1, MILLISECONDS, Rate { frames: 3, seconds: 1 }), 0);
    }
}
