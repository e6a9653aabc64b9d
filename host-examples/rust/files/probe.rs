//! What the program ffprobe says of a file.

use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use super::program::{self, ffprobe};
use super::tags::{Tags, bits_of, chroma_of};
use crate::Result;
use crate::units::Rate;

pub struct Probe {
    /// Of the video stream among all streams.
    pub index: u64,
    pub width: usize,
    pub height: usize,
    pub rate: Rate,
    /// Every frame has its own time by the rate, so none has to be dropped or repeated.
    pub constant: bool,
    pub bits: u32,
    pub tags: Tags,
    /// A picture, not a clip.
    pub still: bool,
    /// About, where the container says so.
    pub frames: Option<u64>,
    /// Codecs of the audio streams.
    pub sound: Vec<String>,
}

pub fn probe(path: &Path) -> Result<Probe> {
    let mut command = ffprobe();
    command.args(["-show_streams", "-show_format", "-of", "json"]).arg(program::as_file(path));
    let output = command.stdin(Stdio::null()).output().map_err(|why| program::missing(path, "ffprobe", &why))?;
    let unreadable = || {
        let said = String::from_utf8_lossy(&output.stderr);
        let why = said.lines().last().unwrap_or("no video stream").trim().to_owned();
        format!("{} is no video that ffmpeg can read ({why}); name one that it can", path.display())
    };
    let found: Value = serde_json::from_slice(&output.stdout).map_err(|_| unreadable())?;
    read(&found).ok_or_else(unreadable)
}

fn read(found: &Value) -> Option<Probe> {
    let streams = found["streams"].as_array()?;
    let of_kind = |kind: &'static str| streams.iter().filter(move |stream| stream["codec_type"] == kind);
    let video = of_kind("video").find(|stream| stream["disposition"]["attached_pic"] != 1)?;
    let text = |key: &str| video[key].as_str().filter(|text| !matches!(*text, "unknown" | "unspecified"));
    let word = |key: &str| text(key).unwrap_or_default().to_owned();
    let rate = |key: &str| text(key).and_then(|text| Rate::parse(text).ok());
    // Of a constant rate both are the same, but for rounding in the second. The first is exact.
    let rates = (rate("r_frame_rate"), rate("avg_frame_rate"));
    let rate = match rates {
        (Some(exact), Some(mean)) if (exact.per_second() / mean.per_second() - 1.0).abs() > 0.01 => mean,
        (exact, mean) => exact.or(mean).unwrap_or(Rate::DEFAULT),
    };
    let format = text("pix_fmt")?;
    let container = found["format"]["format_name"].as_str().unwrap_or_default();
    let seconds = |value: &Value| value["duration"].as_str().and_then(|text| text.parse::<f64>().ok());
    let estimated = || Some((seconds(video).or(seconds(&found["format"]))? * rate.per_second()).round() as u64);
    let mut tags = Tags { range: word("color_range"), space: word("color_space"), ..Tags::default() };
    (tags.transfer, tags.primaries) = (word("color_transfer"), word("color_primaries"));
    tags.chroma = chroma_of(format);
    if tags.range.is_empty() && format.starts_with("yuvj") {
        tags.range = "pc".into();
    }
    Some(Probe {
        index: video["index"].as_u64()?,
        width: video["width"].as_u64()? as usize,
        height: video["height"].as_u64()? as usize,
        rate,
        constant: rates.0 == rates.1,
        bits: text("bits_per_raw_sample").and_then(|n| n.parse().ok()).filter(|n| *n >= 8).unwrap_or(bits_of(format)),
        tags,
        still: container.ends_with("_pipe") || container == "image2",
        frames: text("nb_frames").and_then(|n| n.parse().ok()).or_else(estimated),
        sound: of_kind("audio").filter_map(|stream| Some(stream["codec_name"].as_str()?.to_owned())).collect(),
    })
}
