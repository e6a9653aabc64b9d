//! What the program ffprobe says of a file.

use std::path::Path;

use serde_json::Value;

use super::extras::{Extras, Stream};
use super::hdr;
use super::program;
use super::sequence::Pattern;
use super::tags::{Tags, bits_of, chroma_of, has_alpha};
use super::times::rescaled;
use crate::Result;
use crate::units::Rate;

#[derive(Debug, Clone)]
pub struct Probe {
    /// Of the video stream among all streams.
    pub index: u64,
    pub codec: String,
    pub width: usize,
    pub height: usize,
    /// Nominal: times may say otherwise.
    pub rate: Rate,
    /// Rates that the container and its times suggest.
    pub rates: Vec<Rate>,
    /// Ticks a second of the stream's times.
    pub ticks: Rate,
    /// Of the file, in microseconds.
    pub start: i64,
    /// How much later ffmpeg's zero is when it reads the video alone, in microseconds.
    pub lead: i64,
    pub progressive: bool,
    /// Whether times may jump. ffmpeg mends that.
    pub jumping: bool,
    pub bits: u32,
    pub tags: Tags,
    /// A picture, not a clip.
    pub still: bool,
    /// About, where the container says so.
    pub frames: Option<u64>,
    /// Frames that the header promises. Those of MP4 and MOV are cut by edit lists, and are not told here.
    pub stored: Option<u64>,
    pub extras: Extras,
}

impl Probe {
    /// Ticks of the stream in so many microseconds.
    pub fn ticks_of(&self, microseconds: i64) -> i64 {
        rescaled(microseconds, Rate { frames: 1_000_000, seconds: 1 }, self.ticks)
    }

    /// Whether a complaint may be about the video. ffmpeg looks into all streams to find out what they are.
    pub fn concerns(&self, complaint: &str) -> bool {
        let others = self.extras.sound.iter().chain(&self.extras.subtitles);
        !others.into_iter().any(|stream| !stream.codec.is_empty() && complaint.starts_with(&stream.codec))
    }
}

pub fn probe(path: &Path) -> Result<Probe> {
    let words = ["-show_streams", "-show_format", "-show_chapters", "-of", "json"];
    let output = program::ask(path, &words)?;
    let unreadable = || {
        let why = program::complaints(&output).pop().unwrap_or_else(|| "no video stream".into());
        format!("{} is no video that ffmpeg can read ({why}); name one that it can", path.display())
    };
    let told: Value = serde_json::from_slice(&output.stdout).map_err(|_| unreadable())?;
    let mut found = read(&told).ok_or_else(unreadable)?;
    found.still &= Pattern::parse(path).is_none();
    // Some streams say how they were mastered with their first frame only.
    if found.tags.is_hdr() && found.tags.mastering.is_empty() && !found.still {
        let stream = found.index.to_string();
        let words = ["-select_streams", &stream, "-read_intervals", "%+#1", "-show_frames", "-of", "json"];
        let told: Value = serde_json::from_slice(&program::ask(path, &words)?.stdout).unwrap_or_default();
        mastered(&mut found.tags, &told["frames"][0]);
    }
    Ok(found)
}

/// A text of a stream, unless it says that it does not know.
fn text<'a>(stream: &'a Value, key: &str) -> Option<&'a str> {
    stream[key].as_str().filter(|text| !matches!(*text, "unknown" | "unspecified" | "N/A"))
}

/// No rate of a clip is above it, unless its mean is.
const FASTEST: f64 = 240.0;

/// Formats whose times may jump. ffmpeg counts them from the first stream that is read, those of others from the first
/// of all.
const JUMPING: [&str; 7] = ["mpegts", "mpeg", "ogg", "flv", "hls", "dhav", "ty"];

/// Seconds, in microseconds.
fn microseconds(of: &Value, key: &str) -> Option<i64> {
    let seconds = text(of, key)?.parse::<f64>().ok()?;
    Some((seconds * 1e6).round().clamp(-1e15, 1e15) as i64)
}

/// A fraction such as 30000/1001.
fn rate(stream: &Value, key: &str) -> Option<Rate> {
    text(stream, key).and_then(|text| Rate::parse(text).ok())
}

fn read(told: &Value) -> Option<Probe> {
    let streams = told["streams"].as_array()?;
    let video = streams.iter().find(|stream| is_video(stream))?;
    // The first is one that has a place for every frame, if it is no guess gone wrong. The second is the mean.
    let rates = (rate(video, "r_frame_rate"), rate(video, "avg_frame_rate"));
    let nominal = match rates {
        (Some(every), Some(mean)) if every.per_second() > FASTEST.max(1.01 * mean.per_second()) => mean,
        (every, mean) => every.or(mean).unwrap_or(Rate::DEFAULT),
    };
    let format = text(video, "pix_fmt")?;
    let container = told["format"]["format_name"].as_str().unwrap_or_default();
    let seconds = |value: &Value, key: &str| value[key].as_str().and_then(|text| text.parse::<f64>().ok());
    let length = || seconds(video, "duration").or(seconds(&told["format"], "duration"));
    let number = |key: &str| text(video, key).and_then(|n| n.parse::<u64>().ok());
    let start = microseconds(&told["format"], "start_time").unwrap_or(0);
    let jumping = JUMPING.iter().any(|known| container.split(',').any(|name| name == *known));
    let tick = rate(video, "time_base").unwrap_or(Rate { frames: 1, seconds: 1000 });
    Some(Probe {
        index: video["index"].as_u64()?,
        codec: text(video, "codec_name").unwrap_or_default().to_owned(),
        width: video["width"].as_u64()? as usize,
        height: video["height"].as_u64()? as usize,
        rate: nominal,
        rates: [Some(nominal), rates.0, rates.1].into_iter().flatten().collect(),
        ticks: tick.inverse(),
        start,
        lead: microseconds(video, "start_time").filter(|_| jumping).map_or(0, |time| (time - start).max(0)),
        progressive: matches!(text(video, "field_order"), None | Some("progressive")),
        bits: number("bits_per_raw_sample").map(|n| n as u32).filter(|n| *n >= 8).unwrap_or(bits_of(format)),
        tags: tags(video, format),
        still: container.ends_with("_pipe") || container == "image2",
        jumping,
        frames: number("nb_frames").or_else(|| Some((length()? * nominal.per_second()).round() as u64)),
        stored: number("nb_frames").filter(|_| !container.contains("mov")),
        extras: extras(told, streams, video, jumping.then_some(start)),
    })
}

fn is_video(stream: &Value) -> bool {
    stream["codec_type"] == "video" && stream["disposition"]["attached_pic"] != 1
}

fn tags(video: &Value, format: &str) -> Tags {
    let word = |key: &str| text(video, key).unwrap_or_default().to_owned();
    let mut tags = Tags { range: word("color_range"), space: word("color_space"), ..Tags::default() };
    (tags.transfer, tags.primaries) = (word("color_transfer"), word("color_primaries"));
    tags.chroma = chroma_of(format);
    if tags.range.is_empty() && format.starts_with("yuvj") {
        tags.range = "pc".into();
    }
    mastered(&mut tags, video);
    tags
}

/// Adds what the side data of a stream or a frame say of its mastering.
fn mastered(tags: &mut Tags, of: &Value) {
    for data in of["side_data_list"].as_array().into_iter().flatten() {
        tags.mastering = hdr::mastering(data).unwrap_or(std::mem::take(&mut tags.mastering));
        tags.light = hdr::light(data).unwrap_or(std::mem::take(&mut tags.light));
    }
}

/// What the file has beside the pictures. `zero`: when it begins, if ffmpeg counts from other times.
fn extras(told: &Value, streams: &[Value], video: &Value, zero: Option<i64>) -> Extras {
    let of_kind = |kind: &'static str| {
        let stream = |stream: &Value| Stream {
            index: stream["index"].as_u64().unwrap_or_default(),
            codec: text(stream, "codec_name").unwrap_or_default().to_owned(),
            lead: microseconds(stream, "start_time").zip(zero).map_or(0, |(time, zero)| (time - zero).max(0)),
        };
        streams.iter().filter(move |stream| stream["codec_type"] == kind).map(stream)
    };
    let tag = |of: &Value, key: &str| of["tags"][key].as_str().unwrap_or_default().to_owned();
    let mut unkept = Vec::new();
    if has_alpha(text(video, "pix_fmt").unwrap_or_default()) || tag(video, "alpha_mode") == "1" {
        unkept.push("alpha".to_owned());
    }
    let others = streams.iter().filter(|stream| is_video(stream)).count() - 1;
    if others > 0 {
        unkept.push(crate::units::counted(others as u64, "further video stream"));
    }
    if streams.iter().any(|stream| stream["disposition"]["attached_pic"] == 1) {
        unkept.push("the cover picture".to_owned());
    }
    // Chapters of MP4 are such a stream, and told on their own.
    unkept.extend(of_kind("data").filter(|data| data.codec != "bin_data").map(|data| match data.codec.as_str() {
        "" => "a data stream".to_owned(),
        codec => format!("a data stream ({codec})"),
    }));
    let kinds =
        video["side_data_list"].as_array().into_iter().flatten().filter_map(|data| text(data, "side_data_type"));
    // Turned pictures are read upright; mastering is kept; the last is about buffers of the old stream.
    const KNOWN: [&str; 4] =
        ["Display Matrix", "Mastering display metadata", "Content light level metadata", "CPB properties"];
    unkept.extend(kinds.filter(|kind| !KNOWN.contains(kind)).map(str::to_owned));
    Extras {
        sound: of_kind("audio").collect(),
        subtitles: of_kind("subtitle").collect(),
        attachments: of_kind("attachment").count() as u64,
        chapters: told["chapters"].as_array().map_or(0, Vec::len) as u64,
        title: tag(&told["format"], "title"),
        unkept,
    }
}
