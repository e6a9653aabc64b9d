//! `--frames FIRST:END`: some frames of the output, from the input that they need.

use crate::Result;
use crate::files::Source;
use crate::units::{MOST_FRAMES, counted};
use crate::vae::Vae;

/// Of a part by times, where no frame lies.
pub const EMPTY: &str = "there is no frame in the part asked for; give a longer -t";

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Range")]
pub struct RangeOptions {
    /// Only the first N frames of the output, or these, counted from 0, without END; 1000: goes to the end of the clip.
    /// They are the same to the bit as in the whole. Encode counts latent frames, decode video frames.
    #[arg(long, value_name = "N or FIRST:END", conflicts_with_all = ["ss", "t"])]
    pub frames: Option<String>,
}

/// Output frames, and the input frames that they need. Without a count: to the end of the clip.
pub struct Range {
    pub first: u64,
    pub count: Option<u64>,
    pub input_first: u64,
    pub input_count: Option<u64>,
}

/// The first frame of a range, and its count; without one: to the end.
pub fn parse(text: &str) -> Result<(u64, Option<u64>)> {
    let bad = || format!("--frames: \"{text}\" is no range; write it like 10, 1000:1100 or 1000:");
    if let Some(count) = text.parse::<u64>().ok().filter(|count| *count > 0) {
        return Ok((0, Some(count)));
    }
    let (first, end) = text.split_once(':').ok_or_else(bad)?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| bad());
    let first = if first.is_empty() { 0 } else { number(first)? };
    let end = if end.is_empty() { None } else { Some(number(end)?) };
    let count = end.map(|end| end.checked_sub(first).filter(|count| *count > 0).ok_or_else(bad)).transpose()?;
    Ok((first, count))
}

/// The input of output frames: `count` from `first` on, or all to the end. `clip_frames`: of the whole input, if that is
/// known.
pub fn read(part: (u64, Option<u64>), vae: &Vae, node: &str, clip_frames: Option<u64>) -> Result<Range> {
    let (first, count) = part;
    if count == Some(0) {
        // To the library it would mean all.
        return Err(EMPTY.into());
    }
    // Of a clip whose length is not known, as many frames as the range needs.
    let least = first.saturating_add(count.unwrap_or(1));
    if least > MOST_FRAMES {
        return Err(format!("no clip has frame {}; name an earlier part", least - 1));
    }
    let (outputs, what) = match (clip_frames, node) {
        (Some(frames), "encode") => (vae.latent_frames(frames), "latent frame"),
        (Some(frames), _) => (vae.video_frames(frames), "video frame"),
        (None, _) => (least, ""),
    };
    if least > outputs {
        let has = counted(outputs, what);
        return Err(format!("frames {first} to {} are not all in the clip, which has {has}; name others", least - 1));
    }
    let assumed = if node == "encode" { vae.video_frames(least) } else { vae.latent_frames(least) };
    let inputs = vae.range_inputs(node, clip_frames.unwrap_or(assumed), first, count.unwrap_or(0))?;
    let input_count = count.map(|_| inputs.1);
    Ok(Range { first, count, input_first: inputs.0, input_count })
}

impl Range {
    /// The input frames of the range.
    pub fn of(&self, source: Box<dyn Source>) -> Box<dyn Source> {
        part(source, self.input_first, self.input_count)
    }

    /// Its frames in a clip of `frames` output frames. Fails if the clip has fewer.
    pub fn within(&self, frames: u64) -> Result<u64> {
        let left = frames.checked_sub(self.first).filter(|left| *left >= self.count.unwrap_or(1));
        let left = left.ok_or_else(|| format!("--frames: the clip has {frames} frames; name an earlier range"))?;
        Ok(self.count.unwrap_or(left))
    }

    /// Fails if a clip of unknown length turned out too short.
    pub fn check(&self, written: u64) -> Result<()> {
        match self.count {
            Some(count) if written < count => {
                Err(format!("--frames: the clip ends with frame {}; name an earlier range", self.first + written))
            }
            _ => Ok(()),
        }
    }
}

/// `count` frames of a source from `first` on, or all to its end.
pub fn part(source: Box<dyn Source>, first: u64, count: Option<u64>) -> Box<dyn Source> {
    Box::new(Part { source, skip: first, left: count })
}

struct Part {
    source: Box<dyn Source>,
    skip: u64,
    left: Option<u64>,
}

impl Source for Part {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        while self.skip > 0 {
            if !self.source.read(frame)? {
                return Ok(false);
            }
            self.skip -= 1;
        }
        match &mut self.left {
            Some(0) => return Ok(false),
            Some(left) => *left -= 1,
            None => {}
        }
        self.source.read(frame)
    }
}
