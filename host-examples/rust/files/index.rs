//! The packets of a video stream, as its container lists them: when its frames are shown, and whether all are there.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use super::probe::Probe;
use super::program::{self, Process, as_file};
use super::times::{is_time, rescaled};
use crate::Result;
use crate::units::Rate;

/// Codecs whose every packet is one frame. Others have packets that show nothing.
const ONE_FRAME_EACH: [&str; 13] = [
    "h264", "hevc", "vvc", "av1", "mjpeg", "prores", "dnxhd", "ffv1", "huffyuv", "ffvhuff", "utvideo", "rawvideo",
    "v210",
];

/// Seconds between two packets that ffmpeg takes for a jump.
const JUMP: i64 = 10;

pub struct Index {
    /// In ticks of the stream, from the start of the file on, sorted. Empty where packets do not say.
    pub times: Vec<i64>,
    /// Of the stream.
    pub packets: i64,
    /// Whether every packet is one frame.
    pub exact: bool,
    /// Why it is not whole, in words.
    pub damage: Option<String>,
    /// Of the file in its own ticks; times are counted from it.
    start: i64,
}

impl Index {
    /// Of a picture.
    pub fn none() -> Index {
        Index { times: Vec::new(), packets: 0, exact: false, damage: None, start: 0 }
    }

    pub fn read(path: &Path, found: &Probe) -> Result<Index> {
        // Of all streams: whether the file is whole shows with the last packet, whatever that is of.
        let words = ["-show_entries", "packet=stream_index,pts,dts,flags", "-of", "csv=p=0"];
        let mut process = Process::ask(path, &words)?;
        let answer = BufReader::new(process.stdout().ok_or("ffprobe has no output")?);
        let (start, stream) = (found.ticks_of(found.start), found.index.to_string());
        let second = found.ticks_of(1_000_000);
        let (mut times, mut told, mut packets, mut last) = (Vec::new(), true, 0, None::<i64>);
        for line in answer.lines().map_while(std::io::Result::ok) {
            let mut fields = line.split(',');
            // Side data of a packet comes in lines of its own.
            let (Some(of), Some(shown), Some(decoded), Some(flags)) =
                (fields.next(), fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if of != stream {
                continue;
            }
            packets += 1;
            let decoded = decoded.parse::<i64>().ok().filter(|time| is_time(*time));
            // ffmpeg mends times that jump. Those of the packets say nothing then.
            let jumps = decoded.zip(last).is_some_and(|(time, last)| time < last || time - last > JUMP * second);
            told &= !(found.jumping && jumps);
            last = last.max(decoded);
            // Marked as not to be shown, by an edit list.
            if flags.contains('D') {
                continue;
            }
            match shown.parse::<i64>().ok().filter(|time| is_time(*time)) {
                Some(time) => {
                    times.try_reserve(1).map_err(|_| format!("{} has too many packets", path.display()))?;
                    times.push(time - start);
                }
                None => told = false,
            }
        }
        times.sort_unstable();
        if !told {
            times.clear();
        }
        let complaint = process.outcome()?.1.into_iter().find(|line| found.concerns(line));
        // A clock that counts frames has gaps where frames were never stored, so its last tick tells the length.
        let length = if found.ticks == found.rate { last.map_or(0, |last| last + 1) } else { packets };
        let cut = found.stored.filter(|stored| length < *stored as i64);
        let damage = complaint.or(cut.map(|stored| format!("it has {length} frames, its header says {stored}")));
        let exact = told && found.progressive && ONE_FRAME_EACH.contains(&found.codec.as_str());
        Ok(Index { times, packets, exact, damage, start })
    }

    /// Whether frames come at one rate, but for the rounding of times: the rate, and the time of the first.
    pub fn constant(&self, found: &Probe, rates: &[Rate]) -> Option<(Rate, i64)> {
        let first = *self.times.first()?;
        let fits = |rate: &&Rate| {
            let exact = |frame: usize| rescaled(frame as i64, **rate, found.ticks);
            self.times.iter().enumerate().all(|(frame, time)| (time - first - exact(frame)).abs() <= 1)
        };
        rates.iter().find(fits).map(|rate| (*rate, first))
    }

    /// The number of the frame that is shown at this time, counted from 0 as --frames does.
    pub fn number(&self, time: i64) -> usize {
        self.times.partition_point(|known| *known < time)
    }

    /// The frame at which ffmpeg first complains, by its number and its seconds.
    pub fn locate(&self, path: &Path, found: &Probe) -> Option<(usize, f64)> {
        // Packets are told as they are read, and one thread decodes each before the next is read.
        let mut command = program::talkative("level+info");
        command.args(["-nostats", "-debug_ts", "-threads", "1", "-i"]).arg(as_file(path));
        command.args(["-map", &format!("0:{}", found.index), "-f", "null", "-"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut process = Process::unheard(child.ok()?);
        let (mut time, mut packets) = (None, 0usize);
        for line in BufReader::new(process.stderr()?).split(b'\n').map_while(std::io::Result::ok) {
            let line = String::from_utf8_lossy(&line);
            if line.contains("demuxer -> ") && line.contains("type:video") {
                let shown = line
                    .split_once("pkt_pts:")
                    .and_then(|(_, rest)| rest.split(' ').next()?.parse::<i64>().ok().filter(|time| is_time(*time)));
                packets += 1;
                time = shown.map(|shown| shown - self.start).or(time);
            } else if program::complaint(&line).is_some() {
                break;
            }
        }
        let number = |time: i64| if self.times.is_empty() { packets - 1 } else { self.number(time) };
        time.map(|time| (number(time), time as f64 / found.ticks.per_second()))
    }
}

/// Compares the frames that come with those that the container lists.
pub struct Roll {
    times: Vec<i64>,
    next: usize,
    /// How far rounding may move a time.
    tolerance: i64,
    begun: bool,
}

impl Roll {
    /// Nothing is missed where packets are not frames.
    pub fn new(index: &Index) -> Roll {
        let times = if index.exact { index.times.clone() } else { Vec::new() };
        let least = times.windows(2).map(|pair| pair[1] - pair[0]).min().unwrap_or(0);
        Roll { times, next: 0, tolerance: i64::from(least >= 4), begun: false }
    }

    /// Takes a frame of this time. The time of one that should have come before it. Frames before the first one that can
    /// be decoded do not count: a clip may be cut there.
    pub fn take(&mut self, time: i64) -> Option<i64> {
        let skipped = self.times.get(self.next).copied().filter(|next| *next < time - self.tolerance);
        let missing = skipped.filter(|_| self.begun);
        while self.times.get(self.next).is_some_and(|next| *next < time - self.tolerance) {
            self.next += 1;
        }
        let found = self.times.get(self.next).is_some_and(|next| *next <= time + self.tolerance);
        self.next += usize::from(found);
        self.begun = true;
        missing
    }

    /// The time of a frame that has not come by the end.
    pub fn end(&self) -> Option<i64> {
        self.times.get(self.next).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_roll_finds_what_is_missing() {
        let index = |times: &[i64], exact| Index { times: times.to_vec(), packets: 0, exact, damage: None, start: 0 };
        let missing = |listed: &[i64], come: &[i64]| {
            let mut roll = Roll::new(&index(listed, true));
            come.iter().find_map(|time| roll.take(*time)).or(roll.end())
        };
        assert_eq!(missing(&[0, 40, 80], &[0, 41, 79]), None);
        assert_eq!(missing(&[0, 40, 80, 120], &[0, 80, 120]), Some(40));
        assert_eq!(missing(&[0, 40, 80], &[0, 40]), Some(80));
        assert_eq!(missing(&[0, 40, 80], &[40, 80]), None, "a clip may begin with frames that need earlier ones");
        assert_eq!(missing(&[0, 1, 2], &[0, 2]), Some(1));
        assert_eq!(missing(&[0, 1, 1, 2], &[0, 1, 1, 2]), None);
        let mut roll = Roll::new(&index(&[0, 40], false));
        assert_eq!((roll.take(0), roll.end()), (None, None));
        assert_eq!(index(&[0, 40, 80], true).number(80), 2, "counted from 0");
    }
}
