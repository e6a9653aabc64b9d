//! Clips as one tensor of a safetensors file: latents, and video in floats.
//!
//! A stream of unknown length can only be written frame after frame, so latents are kept as [T, C, h, w]; files with
//! [1, C, T, h, w], as Python programs write them, are read too. The number of dimensions tells them apart.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::safetensors::{self, Entry, Header, Tensor};
use super::stdio;
use super::{Clip, ClipOptions, Sink, Source, Times, extension, times};
use crate::draft::{self, Draft};
use crate::tensor::{Dtype, FrameKind};
use crate::units::Rate;
use crate::{Result, memory};

/// The order of the frames' planes in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    FramesFirst,
    ChannelsFirst,
}

/// Where the plane of a channel of a frame lies, counted in planes.
fn plane_index(order: Order, frames: u64, channels: u64, frame: u64, channel: u64) -> u64 {
    match order {
        Order::FramesFirst => frame * channels + channel,
        Order::ChannelsFirst => channel * frames + frame,
    }
}

/// A latent clip, as its file says.
pub struct Latents {
    pub kind: FrameKind,
    pub frames: u64,
    pub metadata: BTreeMap<String, String>,
    /// Of the frames of video, where they do not come at one rate from zero on.
    pub times: Option<Times>,
    pub source: Box<dyn Source>,
}

/// The tensor of these times, and the seconds of a tick in the metadata.
const TIMES: &str = "times";
const TIME_BASE: &str = "time_base";
/// No latent stands for as many frames.
const MOST_FRAMES_EACH: u64 = 1 << 16;

/// The names that programs give to latents.
const LATENT_NAMES: [&str; 4] = ["latent", "mean", "samples", "latent_tensor"];

pub fn open_latents(path: &Path) -> Result<Latents> {
    // Planes of a frame may lie apart, so a pipe is kept as a file first.
    let spooled = if stdio::is_stdio(path) { Some(stdio::spooled()?) } else { None };
    let path = spooled.as_ref().map_or(path, |spooled| &spooled.path);
    draft::protect(path);
    let header = Header::read(path).map_err(|why| match extension(path).as_str() {
        "safetensors" => why,
        _ if spooled.is_some() => why,
        _ => format!(
            "{} is no file of latents; decode takes the .safetensors file that `vvae encode` writes, and `vvae \
             roundtrip` takes video",
            path.display()
        ),
    })?;
    let name = LATENT_NAMES.into_iter().find(|name| header.tensors.contains_key(*name)).ok_or_else(|| {
        let names = LATENT_NAMES.join(", ");
        format!("{} has no latents; it needs a tensor with one of the names {names}", path.display())
    })?;
    let reader = Reader::open(path, name, &header)?;
    let times = header.tensors.get(TIMES).map(|entry| read_times(path, entry, &header, reader.frames)).transpose()?;
    let reader = Reader { _spooled: spooled, ..reader };
    Ok(Latents { kind: reader.kind, frames: reader.frames, metadata: header.metadata, times, source: Box::new(reader) })
}

fn read_times(path: &Path, entry: &Entry, header: &Header, latents: u64) -> Result<Times> {
    let name = path.display();
    let ticks = header.metadata.get(TIME_BASE).and_then(|text| Rate::parse(text).ok()).map(Rate::inverse);
    let (Some(ticks), "I64", [count]) = (ticks, entry.dtype.as_str(), &entry.shape[..]) else {
        return Err(format!("{name}: {TIMES} must be I64 [frames], with {TIME_BASE} in the metadata; encode it anew"));
    };
    if *count > latents.saturating_mul(MOST_FRAMES_EACH) {
        return Err(format!("{name}: {TIMES} has {count} numbers for {latents} latents; encode it anew"));
    }
    let mut bytes = memory::zeroed::<u8>(entry.bytes as usize, format_args!("{name}: {TIMES}"))?;
    let mut file = File::open(path).map_err(|why| format!("{name} cannot be opened: {why}"))?;
    let read = file.seek(SeekFrom::Start(entry.start)).and_then(|_| file.read_exact(&mut bytes));
    read.map_err(|why| format!("{name} cannot be read: {why}"))?;
    let values = bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
    let list = memory::collected(*count as usize, values, format_args!("{name}: {TIMES}"))?;
    if list.iter().any(|time| !times::is_time(*time)) || !list.is_sorted_by(|a, b| a < b) {
        return Err(format!("{name}: {TIMES} do not rise; encode it anew"));
    }
    Ok(Times::of(ticks, list))
}

pub fn open_video(path: &Path, options: &ClipOptions) -> Result<(Clip, Box<dyn Source>)> {
    let header = Header::read(path)?;
    let reader = Reader::open(path, "video", &header)?;
    let stored = header.metadata.get("fps").and_then(|text| Rate::parse(text).ok());
    let rate = options.rate.or(stored).unwrap_or(Rate::DEFAULT);
    Ok((Clip::new(reader.kind, rate).with_frames(Some(reader.frames)), Box::new(reader)))
}

struct Reader {
    path: PathBuf,
    file: File,
    start: u64,
    kind: FrameKind,
    order: Order,
    frames: u64,
    next: u64,
    /// Keeps what came through a pipe until the end. The file is closed first.
    _spooled: Option<Draft>,
}

impl Reader {
    fn open(path: &Path, name: &str, header: &Header) -> Result<Reader> {
        let file_name = path.display();
        let entry = header.tensors.get(name).ok_or_else(|| {
            let names: Vec<_> = header.tensors.keys().take(5).map(String::as_str).collect();
            format!("{file_name} has no tensor named {name}, only {}; name another file", names.join(", "))
        })?;
        let (order, frames, size) = match entry.shape[..] {
            [1, c, t, h, w] => (Order::ChannelsFirst, t, [c, h, w]),
            [t, c, h, w] => (Order::FramesFirst, t, [c, h, w]),
            _ => {
                let shape = &entry.shape;
                return Err(format!("{file_name}: {name} is {shape:?}; it must be [1, C, T, H, W] or [T, C, H, W]"));
            }
        };
        let dtype = Dtype::parse(&entry.dtype)
            .ok_or_else(|| format!("{file_name}: {name} is {}; store it as F16, BF16 or F32", entry.dtype))?;
        if entry.bytes == 0 || entry.bytes != entry.elements() * dtype.bytes() as u64 {
            return Err(format!("{file_name}: {name} is empty or cut short; write it anew"));
        }
        let file = File::open(path).map_err(|why| format!("{file_name} cannot be opened: {why}"))?;
        let kind = FrameKind::latent(dtype, size.map(|n| n as usize));
        Ok(Reader { path: path.to_owned(), file, start: entry.start, kind, order, frames, next: 0, _spooled: None })
    }
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        if self.next == self.frames {
            return Ok(false);
        }
        let channels = self.kind.channels as u64;
        let plane_bytes = frame.len() / self.kind.channels;
        for (channel, plane) in frame.chunks_exact_mut(plane_bytes).enumerate() {
            let index = plane_index(self.order, self.frames, channels, self.next, channel as u64);
            let at = SeekFrom::Start(self.start + index * plane_bytes as u64);
            let read = self.file.seek(at).and_then(|_| self.file.read_exact(plane));
            read.map_err(|why| format!("{} cannot be read: {why}", self.path.display()))?;
        }
        self.next += 1;
        Ok(true)
    }
}

/// The header is written last, when the length is known, into room kept for it.
const HEADER_ROOM: usize = 4096;

pub struct Writer {
    draft: Draft,
    /// Poured into standard output at the end; the header is known last and comes first.
    piped: bool,
    file: File,
    name: &'static str,
    kind: FrameKind,
    order: Order,
    /// Must be known before if channels come first.
    frames: u64,
    written: u64,
    pub metadata: Vec<(&'static str, String)>,
    /// Told how many frames of video the clip has, once that is known.
    video_frames: Option<std::sync::Arc<std::sync::atomic::AtomicU64>>,
    /// Of these frames, and the rate that goes without times.
    times: (Option<Times>, Rate),
}

/// The file, or one to be poured into standard output.
fn drafted(path: &Path) -> Result<(Draft, bool)> {
    let piped = stdio::is_stdio(path);
    let draft = if piped { Draft::temporary("vvae-output") } else { Draft::new(path) };
    Ok((draft?, piped))
}

/// `video_frames` holds the length of the video by the time the file is finished; `None` for a range of a clip.
pub fn create_latents(
    path: &Path,
    kind: FrameKind,
    metadata: Vec<(&'static str, String)>,
    video_frames: Option<std::sync::Arc<std::sync::atomic::AtomicU64>>,
    times: (Option<Times>, Rate),
) -> Result<Writer> {
    let (draft, piped) = drafted(path)?;
    let file = draft.create()?;
    let order = Order::FramesFirst;
    Ok(Writer { draft, piped, file, name: "latent", kind, order, frames: 0, written: 0, metadata, video_frames, times })
}

pub fn create_video(path: &Path, kind: FrameKind, clip: &Clip) -> Result<Writer> {
    let frames = clip.frames.ok_or_else(|| {
        let name = path.display();
        format!("{name}: the clip's length is not known before it is read; convert it to .y4m first")
    })?;
    let (draft, piped) = drafted(path)?;
    let file = draft.create()?;
    let (order, metadata) = (Order::ChannelsFirst, vec![("fps", clip.rate.to_string())]);
    let (video_frames, times) = (None, (None, clip.rate));
    Ok(Writer { draft, piped, file, name: "video", kind, order, frames, written: 0, metadata, video_frames, times })
}

impl Sink for Writer {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        let plane_bytes = frame.len() / self.kind.channels;
        for (channel, plane) in frame.chunks_exact(plane_bytes).enumerate() {
            let channels = self.kind.channels as u64;
            let index = plane_index(self.order, self.frames, channels, self.written, channel as u64);
            safetensors::write_at(&mut self.file, HEADER_ROOM as u64 + index * plane_bytes as u64, plane)?;
        }
        self.written += 1;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        let (c, h, w) = (self.kind.channels as u64, self.kind.height as u64, self.kind.width as u64);
        let shape = match self.order {
            Order::FramesFirst => vec![self.written, c, h, w],
            Order::ChannelsFirst if self.written == self.frames => vec![1, c, self.written, h, w],
            Order::ChannelsFirst => {
                return Err(format!("the clip has {} frames where {} were announced", self.written, self.frames));
            }
        };
        let bytes = self.written * self.kind.bytes() as u64;
        let mut tensors = vec![(self.name.to_owned(), self.kind.dtype.name(), shape, bytes)];
        if let Some(frames) = &self.video_frames {
            let frames = frames.load(std::sync::atomic::Ordering::Acquire);
            self.metadata.push(("frames", frames.to_string()));
            tensors.extend(self.write_times(frames, HEADER_ROOM as u64 + bytes)?);
        }
        let header = safetensors::header(&tensors, &self.metadata, HEADER_ROOM);
        if header.len() != HEADER_ROOM {
            return Err("the settings are too long for the file's header; use fewer --set".into());
        }
        safetensors::write_at(&mut self.file, 0, &header)?;
        if self.piped { stdio::pour(&self.draft.path) } else { self.draft.finish() }
    }
}

impl Writer {
    /// Writes the times of frames behind the latents, unless the rate tells them. Their entry in the header.
    fn write_times(&mut self, frames: u64, position: u64) -> Result<Option<Tensor>> {
        let (Some(times), rate) = &self.times else { return Ok(None) };
        let list = times.all();
        let times = Times::of(times.ticks, list.get(..frames as usize).unwrap_or(&list).to_vec());
        if times.are_plain(*rate) {
            return Ok(None);
        }
        let bytes: Vec<u8> = times.all().iter().flat_map(|time| time.to_le_bytes()).collect();
        safetensors::write_at(&mut self.file, position, &bytes)?;
        self.metadata.push((TIME_BASE, times.ticks.inverse().to_string()));
        Ok(Some((TIMES.to_owned(), "I64", vec![times.count() as u64], bytes.len() as u64)))
    }
}
