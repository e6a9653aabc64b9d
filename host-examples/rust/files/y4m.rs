//! YUV4MPEG: a line of text, then every frame as a line of text and its planes.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::colour::{Chroma, Matrix, Planes};
use super::stdio::{self, Input, Output};
use super::tags::Tags;
use super::{Clip, ClipOptions, InputOptions, Sink, Source, VideoOptions, constant, read_up_to};
use crate::tensor::{Dtype, FrameKind};
use crate::units::{MOST_PIXELS, Rate, counted};
use crate::{Result, memory, say};

use Chroma::{Full, HalfCentred, HalfCosited};

type Layout = (&'static str, Chroma, Chroma, u32);

/// The layouts we know: the name in the file, horizontal and vertical chroma, bits. Plain 420 is that of JPEG, with
/// chroma in the middle; deep 420 does not say, and is taken as video has it, at the left.
const LAYOUTS: [Layout; 9] = [
    ("444", Full, Full, 8),
    ("422", HalfCosited, Full, 8),
    ("420", HalfCentred, HalfCentred, 8),
    ("420jpeg", HalfCentred, HalfCentred, 8),
    ("420mpeg2", HalfCosited, HalfCentred, 8),
    ("420paldv", HalfCosited, HalfCosited, 8),
    ("444p10", Full, Full, 10),
    ("422p10", HalfCosited, Full, 10),
    ("420p10", HalfCosited, HalfCentred, 10),
];

fn names() -> String {
    LAYOUTS.map(|(name, ..)| name).join(", ")
}

/// The header's line, without its marks.
pub const MAGIC: &str = "YUV4MPEG2";
/// No real header comes near it; it keeps a file that is none from being read whole.
const LONGEST_LINE: u64 = 4096;

struct Reader {
    path: PathBuf,
    file: BufReader<Box<dyn Read + Send>>,
    planes: Planes,
    bytes: Vec<u8>,
    samples: Vec<u16>,
    count: u64,
    keep_damaged: bool,
}

pub fn open(path: &Path, options: &ClipOptions, input: &InputOptions) -> Result<(Clip, Box<dyn Source>)> {
    let name = path.display();
    let Input { from: mut file, length } = stdio::open(path)?;
    let header = line(&mut file).map_err(|why| format!("{name} cannot be read: {why}"))?;
    let mut fields = header.split(' ');
    if fields.next() != Some(MAGIC) {
        return Err(format!("{name} is no y4m file: it does not begin with {MAGIC}"));
    }
    let (mut width, mut height, mut rate, mut layout, mut full_range) = (0, 0, Rate::DEFAULT, "420", false);
    let mut tags = Tags::default();
    for field in fields.filter(|field| !field.is_empty()) {
        let (tag, value) = field.split_at(field.chars().next().map_or(0, char::len_utf8));
        match tag {
            "W" => width = value.parse().unwrap_or(0),
            "H" => height = value.parse().unwrap_or(0),
            // 0:0 means unknown.
            "F" => rate = Rate::parse(value).unwrap_or(Rate::DEFAULT),
            "C" => layout = value,
            "A" => tags.aspect = value.to_owned(),
            "I" if !matches!(value, "p" | "?") => {
                return Err(format!("{name} is interlaced; make it progressive first, with ffmpeg -vf bwdif"));
            }
            "X" if value == "COLORRANGE=FULL" => full_range = true,
            _ => {}
        }
    }
    if tags.ratio().is_none() {
        tags.aspect.clear();
    }
    let is_side = |pixels: &usize| (1..=MOST_PIXELS as usize).contains(pixels);
    if !is_side(&width) || !is_side(&height) {
        return Err(format!("{name} does not say its width and height (W and H in its first line); write it anew"));
    }
    let Some((layout, horizontal, vertical, bits)) = LAYOUTS.into_iter().find(|(known, ..)| *known == layout) else {
        return Err(format!("{name} has the layout {layout}; convert it to one of {}", names()));
    };
    let matrix = options.matrix.unwrap_or(Matrix::usual(width, height));
    let planes = Planes { width, height, horizontal, vertical, bits, full_range, matrix };
    let what = format!("{name}: a frame of {width}x{height}");
    let bytes = memory::zeroed(planes.samples() * if bits > 8 { 2 } else { 1 }, &what)?;
    // A frame line is "FRAME" and its end; with parameters it is longer, so this is exact only where there are none.
    let (before, frame) = (header.len() as u64 + 1, bytes.len() as u64 + 6);
    let expected = length.map(|length| length.saturating_sub(before) / frame);
    let kind = FrameKind::pixels(if bits > 8 { Dtype::U16 } else { Dtype::U8 }, width, height);
    let clip = Clip {
        frames: expected.filter(|frames| length == Some(before + frames * frame)),
        expected,
        y4m: Some(layout),
        bits,
        tags,
        ..Clip::new(kind, options.rate.unwrap_or(rate))
    };
    let (samples, keep_damaged) = (memory::zeroed(planes.samples(), &what)?, input.keep_damaged);
    Ok((clip, Box::new(Reader { path: path.to_owned(), file, planes, bytes, samples, count: 0, keep_damaged })))
}

/// A line without its end; empty at the end of the file.
fn line(file: &mut impl BufRead) -> std::io::Result<String> {
    let mut text = Vec::new();
    Read::by_ref(file).take(LONGEST_LINE).read_until(b'\n', &mut text)?;
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

impl Reader {
    /// An error, or the end of the clip. Where the next frame begins is not known.
    fn damaged(&self, why: String) -> Result<bool> {
        if !self.keep_damaged {
            return Err(format!("{why}; write it anew, or add --keep-damaged to go on with what comes before"));
        }
        say::warn(format_args!("{why}; {} before it are kept", counted(self.count - 1, "frame")));
        Ok(false)
    }
}

impl Source for Reader {
    fn read(&mut self, frame: &mut [u8]) -> Result<bool> {
        let name = self.path.display();
        let mark = line(&mut self.file).map_err(|why| format!("{name} cannot be read: {why}"))?;
        if mark.is_empty() {
            return Ok(false);
        }
        self.count += 1;
        // As --frames counts them.
        let count = self.count - 1;
        if !mark.starts_with("FRAME") {
            return self.damaged(format!("{name} is damaged: frame {count} does not begin with FRAME"));
        }
        let got = read_up_to(&mut self.file, &mut self.bytes).map_err(|why| format!("{name} cannot be read: {why}"))?;
        if got < self.bytes.len() {
            return self.damaged(format!("{name} is cut short within frame {count}"));
        }
        if self.planes.bits > 8 {
            for (sample, pair) in self.samples.iter_mut().zip(self.bytes.chunks_exact(2)) {
                *sample = u16::from_le_bytes([pair[0], pair[1]]);
            }
            let mut out = frame.chunks_exact_mut(2);
            self.planes.unpack(&self.samples, |rgb| {
                for value in rgb {
                    let value = (value * 65535.0).round() as u16;
                    out.next().expect("a frame has room for its pixels").copy_from_slice(&value.to_le_bytes());
                }
            })?;
        } else {
            for (sample, byte) in self.samples.iter_mut().zip(&self.bytes) {
                *sample = u16::from(*byte);
            }
            let mut out = frame.iter_mut();
            self.planes.unpack(&self.samples, |rgb| {
                for value in rgb {
                    *out.next().expect("a frame has room for its pixels") = (value * 255.0).round() as u8;
                }
            })?;
        }
        Ok(true)
    }
}

struct Writer {
    output: Output,
    planes: Planes,
    samples: Vec<u16>,
}

/// The layout that is asked for, else that of a y4m input, else the one that loses least.
fn layout(clip: &Clip, options: &VideoOptions) -> Result<Layout> {
    let asked = options.clip.bits;
    if let Some(asked) = asked.filter(|asked| LAYOUTS.iter().all(|(.., bits)| bits != asked)) {
        return Err(format!("--bits {asked}: y4m has 8 or 10"));
    }
    let find = |wanted: &str| LAYOUTS.into_iter().find(|(known, ..)| *known == wanted);
    if let Some(name) = &options.y4m {
        let found = find(name).ok_or_else(|| format!("--y4m: \"{name}\" is none of {}", names()))?;
        return match asked {
            Some(asked) if asked != found.3 => {
                Err(format!("--y4m {name} has {} bits, not {asked}; leave --bits out", found.3))
            }
            _ => Ok(found),
        };
    }
    let source = clip.y4m.and_then(find);
    let bits = asked.or(source.map(|(.., bits)| bits)).unwrap_or(if clip.bits > 8 { 10 } else { 8 });
    let name = source.map_or("444", |(name, ..)| name);
    let exact = source.filter(|(.., known)| *known == bits);
    // The same chroma in another depth.
    let alike = || LAYOUTS.into_iter().find(|(known, .., depth)| *depth == bits && known[..3] == name[..3]);
    exact.or_else(alike).ok_or_else(|| format!("--bits {bits}: no layout of y4m is like {name}; choose one with --y4m"))
}

pub fn create(path: &Path, clip: &Clip, options: &VideoOptions) -> Result<(FrameKind, Box<dyn Sink>)> {
    let (layout, horizontal, vertical, bits) = layout(clip, options)?;
    let (width, height) = (clip.kind.width, clip.kind.height);
    let matrix = options.clip.matrix.unwrap_or(Matrix::usual(width, height));
    let planes = Planes { width, height, horizontal, vertical, bits, full_range: false, matrix };
    let mut output = Output::create(path)?;
    let Rate { frames, seconds } = clip.rate;
    let (wide, high) = clip.tags.ratio().unwrap_or((1, 1));
    let header =
        format!("{MAGIC} W{width} H{height} F{frames}:{seconds} Ip A{wide}:{high} C{layout} XCOLORRANGE=LIMITED\n");
    output.write(header.as_bytes())?;
    let kind = FrameKind::pixels(if bits > 8 { Dtype::U16 } else { Dtype::U8 }, width, height);
    let samples = memory::zeroed(planes.samples(), format_args!("{}: a frame of {width}x{height}", path.display()))?;
    Ok((kind, constant::steady(Box::new(Writer { output, planes, samples }), clip)))
}

impl Sink for Writer {
    fn write(&mut self, frame: &[u8]) -> Result<()> {
        self.output.write(b"FRAME\n")?;
        let deep = self.planes.bits > 8;
        if deep {
            let value = |i: usize| f32::from(u16::from_le_bytes([frame[2 * i], frame[2 * i + 1]])) / 65535.0;
            self.planes.pack(|i| [0, 1, 2].map(|c| value(3 * i + c)), &mut self.samples)?;
        } else {
            self.planes.pack(|i| [0, 1, 2].map(|c| f32::from(frame[3 * i + c]) / 255.0), &mut self.samples)?;
        }
        self.samples.chunks(1 << 14).try_for_each(|part| {
            let bytes: Vec<u8> = match deep {
                true => part.iter().flat_map(|sample| sample.to_le_bytes()).collect(),
                false => part.iter().map(|sample| *sample as u8).collect(),
            };
            self.output.write(&bytes)
        })
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.output.finish()
    }
}
