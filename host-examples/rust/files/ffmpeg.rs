//! Every other format: through the program ffmpeg, one process that pipes frames to us or takes them from us.

use std::io::{BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;

use super::{Clip, Sink, Source, read_up_to};
use crate::draft::Draft;
use crate::options::VideoOptions;
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, interrupt};

/// A child that is ended with us, and what it complained about.
struct Process {
    child: Child,
    complaints: Option<JoinHandle<String>>,
}

fn start(path: &Path, command: &mut Command) -> Result<Process> {
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(|why| {
        let name = path.display();
        format!(
            "{name} needs the program ffmpeg, which cannot be started ({why}); install it (Debian and Ubuntu: apt \
             install ffmpeg, macOS: brew install ffmpeg, Windows: winget install ffmpeg), or use .y4m, .png or .raw"
        )
    })?;
    let stderr = child.stderr.take();
    // A full pipe would stop the child, so somebody has to read it all the time.
    let complaints = stderr.map(|mut stderr| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        })
    });
    Ok(Process { child, complaints })
}

impl Process {
    /// Waits for it to end, and for it to have been content.
    fn end(&mut self, path: &Path) -> Result<()> {
        let status = self.child.wait().map_err(|why| format!("ffmpeg was lost: {why}"))?;
        let said = self.complaints.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        if status.success() {
            return Ok(());
        }
        let line = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no word why").trim().to_owned();
        Err(format!("ffmpeg failed on {}: {line}", path.display()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ffmpeg() -> Command {
    let mut command = Command::new(std::env::var_os("FFMPEG").unwrap_or_else(|| "ffmpeg".into()));
    command.args(["-nostdin", "-hide_banner"]);
    command
}

/// What ffmpeg says of a file on its own: rate and seconds.
fn describe(path: &Path) -> Result<(Rate, Option<f64>)> {
    let mut process = start(path, ffmpeg().arg("-i").arg(path).stdin(Stdio::null()).stdout(Stdio::null()))?;
    // Without an output it always ends with a complaint; the description comes before that.
    let _ = process.child.wait();
    let said = process.complaints.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
    let Some(video) = said.lines().find(|line| line.contains("Stream #") && line.contains("Video:")) else {
        return Err(format!("{} is no video that ffmpeg can read; name one that it can", path.display()));
    };
    let before = |unit: &str| video.split(", ").find_map(|part| part.trim().strip_suffix(unit)).map(str::trim);
    let rate = before(" fps").or(before(" tbr")).and_then(|text| Rate::parse(text).ok()).unwrap_or(Rate::DEFAULT);
    let seconds = said.lines().find_map(|line| {
        let text = line.trim().strip_prefix("Duration: ")?.split(',').next()?;
        text.split(':').try_fold(0.0, |sum, part| part.parse::<f64>().ok().map(|value| sum * 60.0 + value))
    });
    Ok((rate, seconds))
}

struct Reader {
    path: std::path::PathBuf,
    process: Process,
    pipe: BufReader<ChildStdout>,
    kind: FrameKind,
    /// The first frame's header has been read already.
    begun: bool,
}

pub fn open(path: &Path, options: &VideoOptions) -> Result<(Clip, Box<dyn Source>)> {
    let (found, seconds) = describe(path)?;
    let rate = options.rate.unwrap_or(found);
    let mut command = ffmpeg();
    command.args(["-v", "error", "-i"]).arg(path);
    // A constant rate, and frames that say their own size, which rotation may have changed.
    command.args([
        "-map",
        "0:v:0",
        "-vf",
        &format!("fps={rate}"),
        "-sws_flags",
        "bicubic+accurate_rnd+full_chroma_int",
    ]);
    command.args(["-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe", "-"]);
    let mut process = start(path, command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let stdout = process.child.stdout.take().ok_or("ffmpeg has no output")?;
    let mut pipe = BufReader::with_capacity(1 << 20, stdout);
    let Some((width, height)) = picture_header(&mut pipe)? else {
        process.end(path)?;
        return Err(format!("{} has no frames; name another file", path.display()));
    };
    let kind = FrameKind::pixels(Dtype::U8, width, height);
    let expected = seconds.map(|seconds| (seconds * rate.per_second()).round() as u64);
    let clip = Clip { kind, rate, frames: None, expected, y4m: None };
    Ok((clip, Box::new(Reader { path: path.to_owned(), process, pipe, kind, begun: true })))
}

/// "P6", width, height and 255, each followed by one white space. `None` at the end of the stream.
fn picture_header(pipe: &mut impl Read) -> Result<Option<(usize, usize)>> {
    let strange = || String::from("ffmpeg did not write pictures; try another version of it");
    let mut text = String::new();
    while text.matches([' ', '\n']).count() < 4 {
        let mut byte = [0];
        let got = read_up_to(pipe, &mut byte).map_err(|why| format!("ffmpeg's output cannot be read: {why}"))?;
        match got {
            0 if text.is_empty() => return Ok(None),
            1 if text.len() < 40 => text.push(char::from(byte[0])),
            _ => return Err(strange()),
        }
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let ["P6", width, height, "255"] = words[..] else { return Err(strange()) };
    width.parse().ok().zip(height.parse().ok()).map(Some).ok_or_else(strange)
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        if !std::mem::take(&mut self.begun) {
            let Some(size) = picture_header(&mut self.pipe)? else {
                // An ffmpeg that was interrupted along with us ends in good order, but not at the end.
                interrupt::check()?;
                self.process.end(&self.path)?;
                return Ok(false);
            };
            if size != (self.kind.width, self.kind.height) {
                return Err(format!("{} changes its size on the way; cut it there", self.path.display()));
            }
        }
        let got = read_up_to(&mut self.pipe, frame).map_err(|why| format!("ffmpeg's output cannot be read: {why}"))?;
        if got < frame.len() {
            self.process.end(&self.path)?;
            return Err(format!("ffmpeg stopped within a frame of {}; run again", self.path.display()));
        }
        Ok(true)
    }
}

/// Writes H.264 or, into Matroska, lossless FFV1.
pub struct Encoder {
    process: Process,
    stdin: Option<ChildStdin>,
    // After the process, which must be gone before its file can be removed.
    draft: Draft,
}

impl Encoder {
    pub fn create(path: &Path, kind: FrameKind, rate: Rate) -> Result<Encoder> {
        let deep = kind.dtype == Dtype::U16;
        let lossless = super::extension(path) == "mkv";
        if deep && !lossless {
            return Err(format!("{}: H.264 is written with 8 bits; leave out --bits 16 or use .mkv", path.display()));
        }
        let draft = Draft::new(path)?;
        let mut command = ffmpeg();
        let size = format!("{}x{}", kind.width, kind.height);
        command.args(["-v", "error", "-y", "-f", "rawvideo", "-pix_fmt", if deep { "rgb48le" } else { "rgb24" }]);
        command.args(["-video_size", &size, "-framerate", &rate.to_string(), "-i", "-"]);
        if lossless {
            command.args(["-c:v", "ffv1", "-level", "3", "-pix_fmt", if deep { "gbrp16le" } else { "bgr0" }]);
        } else {
            // Halved chroma needs even sizes.
            let even = kind.width.is_multiple_of(2) && kind.height.is_multiple_of(2);
            let planes = if even { "yuv420p" } else { "yuv444p" };
            command.args(["-vf", &format!("scale=out_color_matrix=bt709:out_range=tv,format={planes}")]);
            command.args(["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]);
            command.args(["-c:v", "libx264", "-crf", "16"]);
        }
        let mut process = start(path, command.arg(&draft.path).stdin(Stdio::piped()).stdout(Stdio::null()))?;
        let stdin = process.child.stdin.take();
        Ok(Encoder { process, stdin, draft })
    }
}

impl Sink for Encoder {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        let written = self.stdin.as_mut().map(|stdin| stdin.write_all(frame));
        if !matches!(written, Some(Ok(()))) {
            // It went away; what it said is the reason.
            self.stdin = None;
            self.process.end(&self.draft.path)?;
            return Err("ffmpeg stopped early; run again".into());
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.stdin = None;
        self.process.end(&self.draft.path)?;
        self.draft.finish()
    }
}
