//! Clips whose frames come at one rate: frames are duplicated and dropped as little as that takes, and counted.

use std::sync::Arc;

use super::times::{Changes, Clock, Times};
use super::{Clip, Sink, Source};
use crate::units::Rate;
use crate::{Result, memory};

/// A clip with the rate that the user wants, if any.
pub fn at_rate(clip: Clip, source: Box<dyn Source>, rate: Option<Rate>) -> (Clip, Box<dyn Source>) {
    let (Some(rate), Some(times)) = (rate, clip.times.clone()) else { return (clip, source) };
    let clock = Clock::new(times.ticks, Some((rate, times.get(0).unwrap_or(0))));
    let given = Times::new(clock.to, false);
    // One ahead of the frames, as an output has to know when the clip begins.
    given.push(clock.of_frame(0));
    let scaled = |frames: u64| (frames as f64 / clip.rate.per_second() * rate.per_second()).round() as u64;
    let expected = clip.expected.map(scaled);
    let pace = Pace { times, rate, changes: Arc::clone(&clip.changes), next: 0, slot: 0 };
    let given_to = given.clone();
    let source = AtRate { source, pace, clock, given, held: Vec::new(), ahead: Vec::new(), left: 0, state: State::New };
    (Clip { rate, frames: None, expected, times: Some(given_to), ..clip }, Box::new(source))
}

/// Tells how often a frame is shown, when the next one is known.
struct Pace {
    times: Times,
    rate: Rate,
    changes: Arc<Changes>,
    /// The frame that comes next, and the slot of the one before.
    next: usize,
    slot: i64,
}

impl Pace {
    /// Takes the next frame. How often the one before it is shown.
    fn step(&mut self) -> u64 {
        let [start, time] = [0, self.next].map(|frame| self.times.get(frame));
        let slot = start.zip(time).map_or(self.slot + 1, |(start, time)| self.times.slot(time, start, self.rate));
        let shown = (slot - self.slot).max(0) as u64;
        if self.next > 0 {
            self.changes.note(shown);
        }
        (self.next, self.slot) = (self.next + 1, slot.max(self.slot));
        shown
    }
}

enum State {
    New,
    Running,
    Ended,
}

struct AtRate {
    source: Box<dyn Source>,
    pace: Pace,
    clock: Clock,
    given: Times,
    /// The frame that is shown, and the one after it.
    held: Vec<u8>,
    ahead: Vec<u8>,
    /// How often it is still to be shown.
    left: u64,
    state: State,
}

impl Source for AtRate {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        while self.left == 0 {
            match self.state {
                State::Ended => return Ok(false),
                State::New => {
                    [self.held, self.ahead] = [room(frame)?, room(frame)?];
                    if !self.source.read(&mut self.ahead)? {
                        return Ok(false);
                    }
                    self.pace.step();
                    self.state = State::Running;
                }
                State::Running => {}
            }
            std::mem::swap(&mut self.held, &mut self.ahead);
            if self.source.read(&mut self.ahead)? {
                self.left = self.pace.step();
            } else {
                (self.left, self.state) = (1, State::Ended);
            }
        }
        self.left -= 1;
        self.given.push(self.clock.of_frame(self.given.count() as i64));
        frame.copy_from_slice(&self.held);
        Ok(true)
    }
}

fn room(frame: &[u8]) -> Result<Vec<u8>> {
    memory::zeroed(frame.len(), "a frame that is shown again")
}

/// A place for a clip of any times whose format knows one rate only.
pub fn steady(sink: Box<dyn Sink>, clip: &Clip) -> Box<dyn Sink> {
    let Some(times) = clip.times.clone() else { return sink };
    let pace = Pace { times, rate: clip.rate, changes: Arc::clone(&clip.changes), next: 0, slot: 0 };
    Box::new(Steady { sink, pace, held: Vec::new() })
}

struct Steady {
    sink: Box<dyn Sink>,
    pace: Pace,
    /// The last frame, until it is known how often it is shown.
    held: Vec<u8>,
}

impl Sink for Steady {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        if self.held.is_empty() {
            self.held = room(frame)?;
            self.pace.step();
        } else {
            (0..self.pace.step()).try_for_each(|_| self.sink.write(&self.held))?;
        }
        self.held.copy_from_slice(frame);
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        if !self.held.is_empty() {
            self.sink.write(&self.held)?;
        }
        self.sink.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Dtype, FrameKind};
    use std::sync::Mutex;

    struct Numbers(u8, u8);

    impl Source for Numbers {
        fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
            frame.fill(self.0);
            self.0 += 1;
            Ok(self.0 <= self.1)
        }
    }

    struct Noted(Arc<Mutex<Vec<u8>>>);

    impl Sink for Noted {
        fn write(&mut self, frame: &[u8]) -> Result<()> {
            self.0.lock().unwrap().push(frame[0]);
            Ok(())
        }

        fn finish(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    const TENTHS: Rate = Rate { frames: 10, seconds: 1 };

    fn clip(times: &[i64]) -> Clip {
        let milliseconds = Rate { frames: 1000, seconds: 1 };
        let kind = FrameKind::pixels(Dtype::U8, 1, 1);
        Clip { times: Some(Times::of(milliseconds, times.to_vec())), ..Clip::new(kind, TENTHS) }
    }

    #[test]
    fn both_ways_show_the_same_frames() {
        for (times, expected) in [
            (&[0, 100, 200][..], &[0, 1, 2][..]),
            (&[500, 603, 699], &[0, 1, 2]),
            (&[0, 100, 400, 410, 500], &[0, 1, 1, 1, 3, 4]),
            (&[70], &[0]),
        ] {
            let given = clip(times);
            let seen = Arc::default();
            let mut sink = steady(Box::new(Noted(Arc::clone(&seen))), &given);
            (0..times.len() as u8)
                .try_for_each(|number| sink.write(&[number; 3]))
                .and_then(|()| sink.finish())
                .unwrap();
            assert_eq!(*seen.lock().unwrap(), expected);
            let counts = given.changes.told(TENTHS);
            let (asked, mut source) = at_rate(clip(times), Box::new(Numbers(0, times.len() as u8)), Some(TENTHS));
            let (mut frame, mut read) = ([0; 3], Vec::new());
            while source.read(&mut frame).unwrap() {
                read.push(frame[0]);
            }
            assert_eq!(read, expected);
            assert_eq!(asked.changes.told(TENTHS), counts);
            assert_eq!(counts.is_some(), times.len() == 5, "{counts:?}");
            let seconds = asked.times.unwrap().start().unwrap_or(0.0);
            assert!((seconds - times[0] as f64 / 1000.0).abs() < 1e-9);
        }
    }
}
