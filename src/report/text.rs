//! Plans in words.

use std::fmt;

use super::numbers::{DeviceDivision, DeviceReport, Part, PlanReport};
use crate::ir::CacheFormat;
use crate::model::FrameRange;

impl fmt::Display for DeviceDivision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, efficiency) = (self.devices.len(), 100.0 * self.efficiency);
        write!(f, "{count} devices, efficiency {efficiency:.0} %")?;
        self.round.map_or(Ok(()), |frames| write!(f, ", rounds of {}", counted(frames, "frame")))?;
        for DeviceReport { device, parts, seconds, device_bytes, unused, .. } in &self.devices {
            write!(f, "\n  {device}: ")?;
            match (unused, parts.is_empty()) {
                (Some(why), _) => write!(f, "not used: {why}")?,
                (None, true) => write!(f, "nothing, as a cut would cost more than it saves")?,
                (None, false) => {
                    let parts: Vec<String> = parts.iter().map(part_text).collect();
                    write!(f, "{}; about {}, {}", parts.join("; "), Seconds(*seconds), Bytes(*device_bytes))?;
                }
            }
        }
        if self.mixed {
            write!(f, "\nmixed devices: bits depend on which device computes a frame")?;
        }
        Ok(())
    }
}

fn part_text(part: &Part) -> String {
    let Part { clips, frames } = part;
    let clips = match part.clip_count() {
        1 => format!("clip {}", clips.start),
        _ => format!("clips {} to {}", clips.start, clips.end - 1),
    };
    format!("{clips}, frames {} to {}", frames.start, frames.end - 1)
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.direction.name();
        match (self.input.frames, self.output.frames) {
            (0, _) => write!(f, "{name} {}", self.input.described())?,
            _ => write!(f, "{name} {} to {}", self.input, self.output)?,
        }
        match self.range {
            FrameRange { first: 0, end: None } => writeln!(f)?,
            FrameRange { first, end: None } => writeln!(f, ", from frame {first} on")?,
            FrameRange { first, end: Some(end) } => writeln!(f, ", frames {first} to {}", end - 1)?,
        }
        if let Some(name) = self.absent {
            writeln!(f, "for a {name}, which is not here: an estimate by its published rates")?;
        }
        writeln!(
            f,
            "memory: {} (weights {}, workspace {})",
            Bytes(self.device_bytes),
            Bytes(self.weight_bytes),
            Bytes(self.workspace_bytes)
        )?;
        self.write_host_memory(f)?;
        let chunks = self.chunk_frames.iter().zip(&self.rematerialised_frames).zip(&self.rematerialised_hidden);
        let chunks = chunks.map(|((frames, outputs), hidden)| chunk_text(*frames, *outputs, *hidden));
        let chunks: Vec<String> = chunks.collect();
        writeln!(
            f,
            "slices of {}; frames per chunk of each stage: {}",
            counted(self.slice_frames, "latent frame"),
            chunks.join(", ")
        )?;
        if self.seconds > 0.0 {
            writeln!(f, "time: about {}", Seconds(self.seconds))?;
        }
        if let Some(division) = &self.division {
            writeln!(f, "{division}")?;
        }
        if self.cache == CacheFormat::U8 {
            writeln!(f, "causal caches in 8 bits: not exact")?;
        }
        if self.exact {
            writeln!(f, "untiled: exact")?;
        } else if !self.is_tiled() {
            writeln!(f, "untiled")?;
        } else {
            let ((rows, columns), (height, width)) = (self.tiles, self.tile_size);
            let overlap = self.tile_overlap;
            writeln!(f, "tiled: not exact; {rows} x {columns} tiles of {width} x {height}, overlap {overlap}")?;
        }
        if !self.arithmetic.is_empty() {
            writeln!(f, "arithmetic: {}", self.arithmetic)?;
        }
        write!(f, "rates: {}", self.rates)
    }
}

impl PlanReport {
    fn write_host_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host_bytes == 0 {
            return Ok(());
        }
        write!(f, "host memory: {}", Bytes(self.host_bytes))?;
        let offloaded = [("frames", self.offloaded_bytes), ("weights", self.offloaded_weight_bytes)];
        let offloaded = offloaded.iter().filter(|(_, bytes)| *bytes > 0);
        let offloaded: Vec<String> =
            offloaded.map(|(what, bytes)| format!("offloaded {what} {}", Bytes(*bytes))).collect();
        if !offloaded.is_empty() {
            write!(f, " ({}; {} moved per frame)", offloaded.join(", "), Bytes(self.moved_per_frame))?;
        }
        writeln!(f)
    }
}

/// The frames of a chunk, and which of them are rematerialised.
fn chunk_text(frames: u64, outputs: u64, hidden: u64) -> String {
    let parts = [(outputs, "output", "of the head"), (hidden, "hidden frame", "of each block")];
    let parts = parts.into_iter().filter(|(count, ..)| *count > 0);
    let parts: Vec<String> = parts.map(|(count, what, of)| format!("{} {of}", counted(count, what))).collect();
    if parts.is_empty() { frames.to_string() } else { format!("{frames} (rematerialised: {})", parts.join(", ")) }
}

/// "1 frame" or "2 frames".
fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// A length of time, for people.
struct Seconds(f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            s if s < 0.1 => write!(f, "{:.0} ms", s * 1000.0),
            s if s < 100.0 => write!(f, "{s:.1} s"),
            s if s < 6000.0 => write!(f, "{:.0} min", s / 60.0),
            s => write!(f, "{:.1} h", s / 3600.0),
        }
    }
}

/// A number of bytes, for people.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        match self.0 {
            0..=1023 => write!(f, "{} B", self.0),
            1024..=1_048_575 => write!(f, "{:.1} KiB", value / 1024.0),
            1_048_576..=1_073_741_823 => write!(f, "{:.1} MiB", value / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", value / 1_073_741_824.0),
        }
    }
}
