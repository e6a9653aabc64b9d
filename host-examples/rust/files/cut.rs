//! A part of a clip as a clip of its own, by frames or by times.

use super::{Clip, Source, Times};
use crate::Result;
use crate::range::EMPTY;
use crate::units::{Rate, counted};

/// `-ss` and `-t`, as ffmpeg has them.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TimeOptions {
    /// Begin at this time, in seconds or as [HH:]MM:SS; also written -ss. Frames before it are read and left out.
    #[arg(long, value_name = "TIME", value_parser = seconds, allow_negative_numbers = true)]
    pub ss: Option<f64>,
    /// Take so much of the clip, in seconds or as [HH:]MM:SS.
    #[arg(short, value_name = "TIME", value_parser = seconds, allow_negative_numbers = true)]
    pub t: Option<f64>,
}

impl TimeOptions {
    /// What they ask for, if they are given.
    pub fn part(&self) -> Option<Part> {
        let given = self.ss.is_some() || self.t.is_some();
        given.then_some(Part::Times { from: self.ss.unwrap_or(0.0), length: self.t })
    }
}

/// "90", "1:30" or "00:01:30.0" as seconds.
fn seconds(text: &str) -> Result<f64> {
    let bad = || format!("\"{text}\" is no time; write it like 12.5 or 01:02:03");
    let numbers: Option<Vec<f64>> =
        text.split(':').map(|part| part.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0)).collect();
    let numbers = numbers.filter(|numbers| (1..=3).contains(&numbers.len())).ok_or_else(bad)?;
    let sum = numbers.iter().fold(0.0, |sum, number| 60.0 * sum + number);
    if sum <= LONGEST { Ok(sum) } else { Err(format!("\"{text}\" is later than any clip's end; give less")) }
}

/// Seconds: thirty years.
const LONGEST: f64 = 1e9;

/// What is wanted of a clip.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Part {
    /// Without a count: to the end.
    Frames { first: u64, count: Option<u64> },
    /// In seconds of the clip's own times.
    Times { from: f64, length: Option<f64> },
}

/// Times that differ by less are one.
const ALIKE: f64 = 1e-6;

impl Part {
    /// The same by frames, of a clip whose frames come at one rate from `start` seconds on.
    fn by_frames(self, rate: Rate, start: f64) -> Part {
        let Part::Times { from, length } = self else { return self };
        let frame = |seconds: f64| ((seconds - start) * rate.per_second() - ALIKE).ceil().max(0.0) as u64;
        let first = frame(from);
        Part::Frames { first, count: length.map(|length| frame(from + length) - first) }
    }

    /// First frame and count of it in a decoded clip, whose times are all known.
    pub fn frames(self, clip: &Clip) -> (u64, Option<u64>) {
        let times = clip.times.as_ref().filter(|times| times.are_uneven());
        let part = match (self, times) {
            (Part::Times { from, length }, Some(times)) => {
                let all = times.all();
                let frame = |seconds: f64| {
                    all.partition_point(|time| *time as f64 / times.ticks.per_second() + ALIKE < seconds) as u64
                };
                let first = frame(from);
                Part::Frames { first, count: length.map(|length| frame(from + length) - first) }
            }
            _ => self.by_frames(clip.rate, start(clip)),
        };
        match part {
            Part::Frames { first, count } => (first, count),
            Part::Times { .. } => (0, None),
        }
    }
}

/// When a clip begins, as far as that is known before it is read.
fn start(clip: &Clip) -> f64 {
    clip.times.as_ref().and_then(Times::start).unwrap_or(0.0)
}

/// The part as a clip that begins at zero.
pub fn cut(mut clip: Clip, source: Box<dyn Source>, part: Part) -> (Clip, Box<dyn Source>) {
    let uneven = clip.times.clone().filter(Times::are_uneven);
    let (rate, begin) = (clip.rate, start(&clip));
    let part = if uneven.is_some() { part } else { part.by_frames(rate, begin) };
    let (from, length) = match part {
        Part::Frames { first, count } => {
            let left = |all: u64| all.saturating_sub(first).min(count.unwrap_or(u64::MAX));
            // Of none the source tells.
            clip.frames = clip.frames.map(left).filter(|frames| *frames > 0);
            clip.expected = clip.expected.map(left).or(count);
            let seconds = |frames: u64| frames as f64 / rate.per_second();
            (begin + seconds(first), count.map(seconds))
        }
        Part::Times { from, length } => {
            clip.frames = None;
            clip.expected = length.map(|length| (length * rate.per_second()) as u64);
            (from, length)
        }
    };
    if let Some(origin) = &mut clip.origin {
        origin.part = Some((from, length));
    }
    clip.first = match part {
        Part::Frames { first, .. } => first,
        Part::Times { .. } => 0,
    };
    let kept = uneven.as_ref().map(|times| Times::new(times.ticks, true));
    clip.times = kept.clone();
    (clip, Box::new(Cut { source, part, read: 0, given: 0, times: uneven, kept, start: 0 }))
}

struct Cut {
    source: Box<dyn Source>,
    part: Part,
    /// Frames of the source so far, and those of them that were given on.
    read: u64,
    given: u64,
    /// Of the source, and of what is given on.
    times: Option<Times>,
    kept: Option<Times>,
    start: i64,
}

impl Cut {
    /// Seconds of the frame that was read last.
    fn seconds(&self) -> f64 {
        let time = |times: &Times| {
            let ticks = times.get(self.read as usize - 1).unwrap_or(0);
            ticks as f64 / times.ticks.per_second()
        };
        self.times.as_ref().map_or(0.0, time)
    }

    /// Whether the part has ended before the next frame is read.
    fn is_over(&self) -> bool {
        matches!(self.part, Part::Frames { count: Some(count), .. } if self.given == count)
    }

    fn keep_time(&mut self) {
        let Some((times, kept)) = self.times.as_ref().zip(self.kept.as_ref()) else { return };
        let time = times.get(self.read as usize - 1).unwrap_or(0);
        if self.given == 0 {
            self.start = time;
        }
        kept.push(time - self.start);
    }

    /// The end, which is an error if nothing was given on. `whole`: all of the source was read.
    fn ended(&self, whole: bool) -> Result<bool> {
        match self.given {
            0 if whole => Err(format!(
                "the clip has {}, none of them within the part asked for; name an earlier one",
                counted(self.read, "frame")
            )),
            0 => Err(EMPTY.into()),
            _ => Ok(false),
        }
    }
}

impl Source for Cut {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        loop {
            if self.is_over() {
                return self.ended(false);
            }
            if !self.source.read(frame)? {
                return self.ended(true);
            }
            self.read += 1;
            let (before, after) = match self.part {
                Part::Frames { first, .. } => (self.read <= first, false),
                Part::Times { from, length } => {
                    let seconds = self.seconds() + ALIKE;
                    (seconds < from, length.is_some_and(|length| seconds >= from + length))
                }
            };
            if after {
                return self.ended(false);
            }
            if !before {
                self.keep_time();
                self.given += 1;
                return Ok(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Dtype, FrameKind};

    struct Numbers(u8);

    impl Source for Numbers {
        fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
            self.0 += 1;
            frame[0] = self.0 - 1;
            Ok(self.0 <= 30)
        }
    }

    fn taken(part: Part) -> Result<Vec<u8>> {
        let clip = Clip::new(FrameKind::pixels(Dtype::U8, 1, 1), Rate { frames: 10, seconds: 1 }).with_frames(Some(30));
        let (clip, mut source) = cut(clip, Box::new(Numbers(0)), part);
        let (mut all, mut frame) = (Vec::new(), [0; 3]);
        while source.read(&mut frame)? {
            all.push(frame[0]);
        }
        assert_eq!(clip.frames, Some(all.len() as u64));
        Ok(all)
    }

    #[test]
    fn times_and_frames_name_the_same_part() {
        assert_eq!(taken(Part::Times { from: 1.0, length: Some(0.3) }).unwrap(), [10, 11, 12]);
        assert_eq!(taken(Part::Frames { first: 10, count: Some(3) }).unwrap(), [10, 11, 12]);
        assert_eq!(taken(Part::Times { from: 2.75, length: None }).unwrap(), [28, 29]);
        assert_eq!(taken(Part::Frames { first: 0, count: Some(99) }).unwrap().len(), 30);
        assert!(taken(Part::Times { from: 3.0, length: None }).unwrap_err().contains("30 frames"));
        for length in [0.0, 0.01] {
            assert_eq!(taken(Part::Times { from: 1.05, length: Some(length) }).unwrap_err(), EMPTY);
        }
    }

    #[test]
    fn times_are_read_as_ffmpeg_reads_them() {
        assert_eq!(["12.5", "1:30", "01:00:01.5"].map(|text| seconds(text).unwrap()), [12.5, 90.0, 3601.5]);
        assert!(["", "-1", "1:2:3:4", "nan", "1m", "1e300", "1e308:0"].iter().all(|text| seconds(text).is_err()));
    }
}
