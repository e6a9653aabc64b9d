//! Writes a video, or one picture, through ffmpeg, with what its source has beside the pictures.

use std::io::Write;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};

use super::program::{self, Process, as_file, ffmpeg};
use super::times::{Times, rescaled};
use super::{Clip, Sink, VideoOptions, codec, matroska};
use crate::draft::Draft;
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, say};

/// ffmpeg's clock on our side of the pipe.
const NANOSECONDS: Rate = Rate { frames: 1_000_000_000, seconds: 1 };

pub struct Encoder {
    process: Process,
    stdin: Option<ChildStdin>,
    /// One frame after the other, if there are none.
    times: Option<Times>,
    rate: Rate,
    written: u64,
    keep_damaged: bool,
    // After the process, which must be gone before its file can be removed.
    draft: Draft,
}

impl Encoder {
    pub fn create(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<(FrameKind, Encoder)> {
        let choice = codec::choose(path, clip, options)?;
        let dtype = if choice.bits > 8 { Dtype::U16 } else { Dtype::U8 };
        let kind = FrameKind::pixels(dtype, clip.kind.width, clip.kind.height);
        let draft = Draft::new(path)?;
        let mut command = ffmpeg();
        command.arg("-y");
        let ticks = clip.times.as_ref().map_or(clip.rate, |times| times.ticks);
        // ffmpeg counts from the first frame, and adds this.
        let start = clip.times.as_ref().and_then(|times| times.get(0)).unwrap_or(0);
        if start != 0 {
            let microseconds = rescaled(start, ticks, Rate { frames: 1_000_000, seconds: 1 });
            command.args(["-itsoffset", &seconds(microseconds)]);
        }
        command.args(["-f", "matroska", "-i", "-"]);
        extras(&mut command, clip, &choice);
        command.args(&choice.arguments).args(program::as_they_are());
        command.args(["-enc_time_base:v", &format!("{}/{}", ticks.seconds, ticks.frames)]);
        let command = command.arg(as_file(&draft.path)).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut process = Process::start(path, command)?;
        let stdin = process.stdin();
        let (times, rate) = (clip.times.clone(), clip.rate);
        let keep_damaged = clip.origin.as_ref().is_some_and(|origin| origin.keep_damaged);
        let mut encoder = Encoder { process, stdin, times, rate, written: 0, keep_damaged, draft };
        encoder.pipe(&matroska::header(kind, clip.rate, &clip.tags))?;
        Ok((kind, encoder))
    }

    fn pipe(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.stdin.as_mut().map(|stdin| stdin.write_all(bytes));
        if !matches!(written, Some(Ok(()))) {
            // It went away; what it said is the reason.
            self.stdin = None;
            let complaints = self.process.end(self.draft.target())?;
            let why = complaints.last().map_or("it stopped early", String::as_str);
            return Err(program::failed(self.draft.target(), why));
        }
        Ok(())
    }

    /// Nanoseconds from the first frame to the next one.
    fn time(&self) -> u64 {
        let frame = self.written as usize;
        let time = match &self.times {
            Some(times) => {
                let [start, time] = [0, frame].map(|frame| times.get(frame).unwrap_or(frame as i64));
                rescaled(time, times.ticks, NANOSECONDS) - rescaled(start, times.ticks, NANOSECONDS)
            }
            None => rescaled(frame as i64, self.rate, NANOSECONDS),
        };
        time.max(0) as u64
    }

    /// ffmpeg may end in good order although the disk was full. What counts is what lies there.
    fn check(&self) -> Result<()> {
        let path = self.draft.target();
        if super::extension(path) == "webp" {
            return check_webp(&self.draft.path, path);
        }
        let words = ["-select_streams", "v:0", "-count_packets", "-show_entries", "stream=nb_read_packets"];
        let output = program::ask(&self.draft.path, &[&words[..], &["-of", "csv=p=0"]].concat())?;
        let told = String::from_utf8_lossy(&output.stdout);
        let found = told.trim().trim_end_matches(',').parse::<u64>().unwrap_or(0);
        if found == self.written {
            return Ok(());
        }
        let (name, written) = (path.display(), self.written);
        Err(format!(
            "{name} has {found} frames where {written} were written; make room on the disk, or try another format"
        ))
    }
}

/// ffprobe reads no animated WebP. Its header tells how long the file is.
fn check_webp(draft: &Path, path: &Path) -> Result<()> {
    let bytes = std::fs::read(draft).map_err(|why| format!("{} cannot be read: {why}", path.display()))?;
    let told = bytes.get(4..8).map_or(0, |size| u32::from_le_bytes([size[0], size[1], size[2], size[3]]) as usize);
    if bytes.starts_with(b"RIFF") && told + 8 == bytes.len() {
        return Ok(());
    }
    Err(format!("{} is not whole; make room on the disk, or try another format", path.display()))
}

/// As ffmpeg's arguments have it.
fn seconds(microseconds: i64) -> String {
    format!("{:.6}", microseconds as f64 / 1e6)
}

/// Adds the streams of the output, and the file that some of them come from.
fn extras(command: &mut Command, clip: &Clip, choice: &codec::Choice) {
    if choice.container.is_silent() {
        return;
    }
    match clip.origin.as_ref().filter(|_| clip.extras.are_any()) {
        Some(origin) => {
            let kept = clip.extras.kept(choice.container);
            command.args(["-itsoffset", &seconds(kept.lead)]);
            if let Some((from, length)) = origin.part {
                command.args(["-ss", &format!("{from:.6}")]);
                if let Some(length) = length {
                    command.args(["-t", &format!("{length:.6}")]);
                }
            }
            command.arg("-i").arg(as_file(&origin.path));
            command.args(["-map", "0:v:0"]).args(kept.arguments);
            if origin.part.is_some() {
                // Packets that are copied come from a keyframe before the part on.
                command.args(["-copypriorss", "0"]);
            }
        }
        None if !clip.extras.title.is_empty() => {
            command.args(["-metadata", &format!("title={}", clip.extras.title)]);
        }
        None => {}
    }
}

impl Sink for Encoder {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        let head = matroska::frame(frame.len(), self.time());
        self.pipe(&head)?;
        self.pipe(frame)?;
        self.written += 1;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.stdin = None;
        let complaints = self.process.end(self.draft.target())?;
        match complaints.first() {
            Some(line) if self.keep_damaged => say::warn(format_args!("{}: {line}", self.draft.target().display())),
            Some(line) => return Err(program::failed(self.draft.target(), line)),
            None => {}
        }
        self.draft.sync()?;
        self.check()?;
        self.draft.finish()
    }
}
