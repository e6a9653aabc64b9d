//! Bare RGB frames with their times, as a stream of Matroska, which ffmpeg reads from a pipe.
//!
//! An element is its number, the length of its contents, and these. Every frame is a cluster of its own, so that times
//! are counted in nanoseconds.

use super::hdr;
use super::tags::Tags;
use crate::tensor::FrameKind;
use crate::units::Rate;

fn element(number: u32, contents: &[u8]) -> Vec<u8> {
    [&prefix(number, contents.len() as u64)[..], contents].concat()
}

/// The number, and a length in eight bytes.
fn prefix(number: u32, length: u64) -> Vec<u8> {
    let number = number.to_be_bytes();
    let used = number.iter().position(|byte| *byte != 0).unwrap_or(3);
    [&number[used..], &(length | 1 << 56).to_be_bytes()].concat()
}

fn whole(number: u32, value: u64) -> Vec<u8> {
    element(number, &value.to_be_bytes())
}

fn float(number: u32, value: f64) -> Vec<u8> {
    element(number, &value.to_be_bytes())
}

/// What comes before the frames. `kind` is interleaved, of 8 or 16 bits.
pub fn header(kind: FrameKind, rate: Rate, tags: &Tags) -> Vec<u8> {
    let bits = 8 * 3 * kind.dtype.bytes() as u8;
    let format = element(0x2EB524, &[b'R', b'G', b'B', bits]);
    let size = [whole(0xB0, kind.width as u64), whole(0xBA, kind.height as u64)].concat();
    let video = element(0xE0, &[size, format, colour(tags)].concat());
    // Nanoseconds of a frame. Encoders want to know about how fast frames come.
    let duration = whole(0x23E383, (1e9 / rate.per_second()).round().max(1.0) as u64);
    let codec = element(0x86, b"V_UNCOMPRESSED");
    let track = [whole(0xD7, 1), whole(0x73C5, 1), whole(0x83, 1), codec, duration, video].concat();
    let kind = [element(0x4282, b"matroska"), whole(0x4287, 4), whole(0x4285, 2)].concat();
    // A segment of unknown length, whose ticks are nanoseconds.
    let segment = [0x18, 0x53, 0x80, 0x67, 0xff];
    let info = element(0x1549_A966, &whole(0x2AD7B1, 1));
    [element(0x1A45_DFA3, &kind), segment.to_vec(), info, element(0x1654_AE6B, &element(0xAE, &track))].concat()
}

/// How the video was mastered, if it is known.
fn colour(tags: &Tags) -> Vec<u8> {
    let light = hdr::brightest(&tags.light).map(|[most, mean]| [whole(0x55BC, most), whole(0x55BD, mean)].concat());
    // Red comes first here.
    const NUMBERS: [u32; 10] = [0x55D3, 0x55D4, 0x55D5, 0x55D6, 0x55D1, 0x55D2, 0x55D7, 0x55D8, 0x55D9, 0x55DA];
    let display = hdr::display(&tags.mastering).map(|fields| {
        let fields: Vec<Vec<u8>> = NUMBERS.iter().zip(fields).map(|(number, value)| float(*number, value)).collect();
        element(0x55D0, &fields.concat())
    });
    let contents = [light, display].into_iter().flatten().collect::<Vec<_>>().concat();
    if contents.is_empty() { contents } else { element(0x55B0, &contents) }
}

/// What comes before the bytes of a frame. `time` is in nanoseconds.
pub fn frame(bytes: usize, time: u64) -> Vec<u8> {
    // The track's number, a time relative to the cluster's, and flags: a key frame.
    let block = [0x81, 0, 0, 0x80];
    let time = whole(0xE7, time);
    let head = prefix(0xA3, (block.len() + bytes) as u64);
    let cluster = prefix(0x1F43_B675, (time.len() + head.len() + block.len() + bytes) as u64);
    [cluster, time, head, block.to_vec()].concat()
}
