//! Every other format: through the program ffmpeg, which pipes frames and their times to us.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Stdio};

use super::colour::Matrix;
use super::damage::Check;
use super::index::Index;
use super::probe::{Probe, probe};
use super::program::{self, Process, as_file, ffmpeg};
use super::times::{Clock, Times, is_time};
use super::{Clip, ClipOptions, InputOptions, Origin, Source, read_up_to};
use crate::tensor::{Dtype, FrameKind};
use crate::{Result, interrupt, memory};

/// One output of pictures, each followed by a line of text with its time. Both are written to one pipe in turn.
const PICTURES_AND_TIMES: &str = "[f=image2pipe:flush_packets=1]pipe:1|[f=framecrc:flush_packets=1]pipe:1";
/// No line of it comes near.
const LONGEST_LINE: u64 = 4096;

struct Reader {
    path: PathBuf,
    process: Process,
    pipe: BufReader<ChildStdout>,
    kind: FrameKind,
    /// The first frame, which is read beforehand: an output has to know when it begins.
    first: Option<Vec<u8>>,
    /// From the zero of ffmpeg's times to that of the file, in ticks of the stream.
    lead: i64,
    clock: Clock,
    times: Times,
    check: Check,
}

pub fn open(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    let found = probe(path)?;
    let index = if found.still { Index::none() } else { Index::read(path, &found)? };
    let check = Check::new(path, index, &found, input.keep_damaged)?;
    let constant = check.index.constant(&found, &found.rates);
    let (clock, rate) = (Clock::new(found.ticks, constant), constant.map_or(found.rate, |(rate, _)| rate));
    let mut process = start(path, &found, options)?;
    let stdout = process.stdout().ok_or("ffmpeg has no output")?;
    let mut pipe = BufReader::with_capacity(1 << 20, stdout);
    let mut tags = found.tags.clone();
    let size = loop {
        match next(&mut pipe)? {
            Item::Note(line) => tags.aspect = aspect(&line).unwrap_or(tags.aspect),
            Item::Picture(width, height) => break (width, height),
            Item::Time(_) => {}
            Item::End => {
                process.end(path)?;
                return Err(format!("{} has no frames; name another file", path.display()));
            }
        }
    };
    let kind = FrameKind::pixels(if found.bits > 8 { Dtype::U16 } else { Dtype::U8 }, size.0, size.1);
    let times = Times::new(clock.to, constant.is_none());
    let exact = check.index.exact && !input.keep_damaged;
    let frames = if found.still { Some(1) } else { exact.then_some(check.index.times.len() as u64) };
    let lead = found.ticks_of(found.lead);
    let mut reader = Reader { path: path.to_owned(), process, pipe, kind, first: None, lead, clock, times, check };
    let mut first = memory::zeroed(kind.bytes(), format_args!("{}: a frame of {}x{}", path.display(), size.0, size.1))?;
    reader.picture(&mut first)?;
    reader.first = Some(first);
    let clip = Clip {
        frames,
        expected: frames.or(found.frames),
        bits: found.bits,
        tags,
        times: (!found.still).then(|| reader.times.clone()),
        origin: Some(Origin { path: path.to_owned(), keep_damaged: input.keep_damaged, part: None }),
        extras: found.extras,
        ..Clip::new(kind, rate)
    };
    Ok((clip, Box::new(reader)))
}

fn start(path: &Path, found: &Probe, options: &ClipOptions) -> Result<Process> {
    let mut filters = String::new();
    if !found.tags.chroma.is_empty() {
        let usual = options.matrix.unwrap_or(Matrix::usual(found.width, found.height)).name();
        let matrix = found.tags.matrix().filter(|_| options.matrix.is_none()).unwrap_or(usual);
        let range = if found.tags.range == "pc" { "pc" } else { "tv" };
        filters += &format!("scale=in_color_matrix={matrix}:in_range={range}:out_range=pc,");
    }
    filters += if found.bits > 8 { "format=rgb48be" } else { "format=rgb24" };
    let mut command = ffmpeg();
    command.arg("-i").arg(as_file(path)).args(["-map", &format!("0:{}", found.index), "-vf", &filters]);
    command.args(["-sws_flags", "bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"]);
    command.args(program::as_they_are());
    command.args(["-enc_time_base", &format!("{}/{}", found.ticks.seconds, found.ticks.frames)]);
    // Pictures say their own size: a rotated video has its sides swapped.
    command.args(["-c:v", "ppm", "-f", "tee", PICTURES_AND_TIMES]);
    Process::start(path, command.stdin(Stdio::null()).stdout(Stdio::piped()))
}

/// What comes through the pipe.
enum Item {
    /// A line that begins with #.
    Note(String),
    /// The size of a picture, whose pixels follow.
    Picture(usize, usize),
    /// Of the picture before; in ticks of the stream, if it has one.
    Time(Option<i64>),
    End,
}

fn next(pipe: &mut impl BufRead) -> Result<Item> {
    let strange = || String::from("ffmpeg did not write pictures and their times; try another version of it");
    let mut line = || -> Result<String> {
        let mut text = Vec::new();
        let read = Read::by_ref(pipe).take(LONGEST_LINE).read_until(b'\n', &mut text);
        read.map_err(|why| format!("ffmpeg's output cannot be read: {why}"))?;
        String::from_utf8(text).map_err(|_| strange())
    };
    let first = line()?;
    match first.as_bytes().first() {
        None => Ok(Item::End),
        Some(b'#') => Ok(Item::Note(first)),
        Some(b'P') => {
            let (size, depth) = (line()?, line()?);
            let numbers: Vec<usize> = size.split_whitespace().filter_map(|number| number.parse().ok()).collect();
            match (first.trim(), &numbers[..], depth.trim()) {
                ("P6", [width, height], "255" | "65535") => Ok(Item::Picture(*width, *height)),
                _ => Err(strange()),
            }
        }
        // Stream, decoding time, time, duration, size and checksum.
        Some(b'0') => first
            .split(',')
            .nth(2)
            .map(|time| Item::Time(time.trim().parse().ok().filter(|time| is_time(*time))))
            .ok_or_else(strange),
        Some(_) => Err(strange()),
    }
}

/// Width to height of a pixel, from the line "#sar 0: 16/11".
fn aspect(line: &str) -> Option<String> {
    let (width, height) = line.strip_prefix("#sar 0: ")?.trim().split_once('/')?;
    (width != height && width != "0").then(|| format!("{width}:{height}"))
}

impl Reader {
    /// The pixels of a picture whose size was read, and its time.
    fn picture(&mut self, frame: &mut [u8]) -> Result<()> {
        let failed = |why| format!("ffmpeg's output cannot be read: {why}");
        let got = read_up_to(&mut self.pipe, frame).map_err(failed)?;
        if got < frame.len() {
            interrupt::check()?;
            self.process.end(&self.path)?;
            return Err(format!("ffmpeg stopped within a frame of {}; run again", self.path.display()));
        }
        if self.kind.dtype == Dtype::U16 {
            // These pictures have the high byte first.
            frame.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
        }
        let Item::Time(time) = next(&mut self.pipe)? else {
            return Err("ffmpeg wrote a picture without its time; try another version of it".into());
        };
        let (read, time) = (self.times.count(), time.map(|time| time + self.lead));
        if let Some(time) = time {
            self.check.frame(time, read)?;
        }
        // One without a time comes after the last.
        let next = || read.checked_sub(1).and_then(|last| self.times.get(last)).map_or(0, |last| last + 1);
        self.times.push(time.map_or_else(next, |time| self.clock.tell(time)));
        self.check.complaints(&self.process.complaints(), read + 1)
    }
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        if let Some(first) = self.first.take() {
            frame.copy_from_slice(&first);
            return Ok(true);
        }
        let size = loop {
            match next(&mut self.pipe)? {
                Item::Picture(width, height) => break (width, height),
                Item::Note(_) | Item::Time(_) => {}
                Item::End => {
                    // An ffmpeg that was interrupted along with us ends in good order, but not at the end.
                    interrupt::check()?;
                    let (read, (done, complaints)) = (self.times.count(), self.process.outcome()?);
                    self.check.complaints(&complaints, read)?;
                    return self.check.end(read, done).map(|()| false);
                }
            }
        };
        if size != (self.kind.width, self.kind.height) {
            return Err(format!("{} changes its size on the way; cut it there", self.path.display()));
        }
        self.picture(frame).map(|()| true)
    }
}
