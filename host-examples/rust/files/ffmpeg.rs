//! Every other format: through the program ffmpeg, one process that pipes frames to us or takes them from us.

use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Stdio};

use super::colour::Matrix;
use super::probe::probe;
use super::program::{Process, as_file, ffmpeg};
use super::{Clip, Sink, Source, VideoOptions, codec, read_up_to};
use crate::draft::Draft;
use crate::tensor::{Dtype, FrameKind};
use crate::{Result, interrupt};

struct Reader {
    path: PathBuf,
    process: Process,
    pipe: BufReader<ChildStdout>,
    kind: FrameKind,
    /// The first frame's header has been read already.
    begun: bool,
}

pub fn open(path: &Path, options: &VideoOptions) -> Result<(Clip, Box<dyn Source>)> {
    let found = probe(path)?;
    let rate = options.rate.unwrap_or(found.rate);
    let deep = found.bits > 8;
    let as_is = found.constant && options.rate.is_none();
    let mut filters = if as_is { String::new() } else { format!("fps={rate},") };
    if !found.tags.chroma.is_empty() {
        let usual = options.matrix.unwrap_or(Matrix::usual(found.width, found.height)).name();
        let matrix = found.tags.matrix().filter(|_| options.matrix.is_none()).unwrap_or(usual);
        let range = if found.tags.range == "pc" { "pc" } else { "tv" };
        filters += &format!("scale=in_color_matrix={matrix}:in_range={range}:out_range=pc,");
    }
    filters += if deep { "format=rgb48be" } else { "format=rgb24" };
    let mut command = ffmpeg();
    command.arg("-i").arg(as_file(path)).args(["-map", &format!("0:{}", found.index), "-vf", &filters]);
    command.args(["-sws_flags", "bicubic+accurate_rnd+full_chroma_int+full_chroma_inp"]);
    if as_is {
        command.args(["-vsync", "passthrough"]);
    }
    // Pictures say their own size: a rotated video has its sides swapped.
    command.args(["-c:v", "ppm", "-f", "image2pipe", "-"]);
    let mut process = Process::start(path, command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let stdout = process.stdout().ok_or("ffmpeg has no output")?;
    let mut pipe = BufReader::with_capacity(1 << 20, stdout);
    let Some(size) = picture_header(&mut pipe)? else {
        process.end(path)?;
        return Err(format!("{} has no frames; name another file", path.display()));
    };
    let kind = FrameKind::pixels(if deep { Dtype::U16 } else { Dtype::U8 }, size.0, size.1);
    let clip = Clip {
        frames: found.still.then_some(1),
        expected: if found.still { Some(1) } else { found.frames },
        bits: found.bits,
        tags: found.tags,
        sound: (!found.sound.is_empty()).then(|| (path.to_owned(), found.sound)),
        ..Clip::new(kind, rate)
    };
    Ok((clip, Box::new(Reader { path: path.to_owned(), process, pipe, kind, begun: true })))
}

/// "P6", width, height and the largest value, each followed by one white space. `None` at the end of the stream.
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
    let ["P6", width, height, "255" | "65535"] = words[..] else { return Err(strange()) };
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
        if self.kind.dtype == Dtype::U16 {
            // These pictures have the high byte first.
            frame.chunks_exact_mut(2).for_each(|pair| pair.swap(0, 1));
        }
        Ok(true)
    }
}

/// Writes a video, or one picture, with the sound of the source.
pub struct Encoder {
    process: Process,
    stdin: Option<ChildStdin>,
    // After the process, which must be gone before its file can be removed.
    draft: Draft,
}

impl Encoder {
    pub fn create(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<(FrameKind, Encoder)> {
        let choice = codec::choose(path, clip, options)?;
        let deep = choice.bits > 8;
        let kind = FrameKind::pixels(if deep { Dtype::U16 } else { Dtype::U8 }, clip.kind.width, clip.kind.height);
        let draft = Draft::new(path)?;
        let mut command = ffmpeg();
        let size = format!("{}x{}", kind.width, kind.height);
        command.args(["-y", "-f", "rawvideo", "-pix_fmt", if deep { "rgb48le" } else { "rgb24" }]);
        command.args(["-video_size", &size, "-framerate", &clip.rate.to_string(), "-i", "-"]);
        if let Some((source, _)) = clip.sound.as_ref().filter(|_| choice.sound.is_some()) {
            command.arg("-i").arg(as_file(source)).args(["-map", "0:v:0", "-map", "1:a"]);
        }
        command.args(&choice.arguments).args(choice.sound.iter().flat_map(|codec| ["-c:a", codec]));
        let mut process =
            Process::start(path, command.arg(as_file(&draft.path)).stdin(Stdio::piped()).stdout(Stdio::null()))?;
        let stdin = process.stdin();
        Ok((kind, Encoder { process, stdin, draft }))
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
