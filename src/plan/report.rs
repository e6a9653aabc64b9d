//! What a plan says, in numbers and in words.

use std::fmt;

use crate::model::Direction;
use crate::tensor::Shape;

/// The answer to "what would this job take?". The run that follows takes exactly this.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub direction: Direction,
    pub input: Shape,
    pub output: Shape,
    /// Device memory in all. On the CPU this is host memory.
    pub device_bytes: u64,
    /// Host memory beside it; 0 on the CPU, where `device_bytes` is host memory already.
    pub host_bytes: u64,
    /// The part of `host_bytes` for frames that wait there, and the bytes that move, of weights too and both ways together, for
    /// each frame that comes out.
    pub past_bytes: u64,
    pub moved_per_frame: u64,
    /// About how long the job takes; 0 for a stream.
    pub seconds: f64,
    /// The parts of `device_bytes`.
    pub weight_bytes: u64,
    /// The part of `host_bytes` for weights that wait there.
    pub waiting_weight_bytes: u64,
    pub workspace_bytes: u64,
    /// Latent frames that go through at a time, after the first.
    pub slice_frames: u64,
    /// Frames that each level computes at a time, in the order of the stages.
    pub chunk_frames: Vec<u64>,
    /// Of these, how many are made anew for each layer that reads them.
    pub anew_frames: Vec<u64>,
    /// Rows and columns of tiles; (1, 1) when untiled.
    pub tiles: (u64, u64),
    /// Size and overlap of a tile in pixels; the whole image and 0 when untiled.
    pub tile_size: (u64, u64),
    pub tile_overlap: u64,
    /// Same numbers as the authors' implementation, untiled.
    pub exact: bool,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.direction {
            Direction::Encode => "encode",
            Direction::Decode => "decode",
        };
        match (self.input.frames, self.output.frames) {
            (0, _) => writeln!(f, "{name} a stream of frames {} x {}", self.input.width, self.input.height)?,
            _ => writeln!(f, "{name} {} to {}", self.input, self.output)?,
        }
        writeln!(
            f,
            "memory: {} (weights {}, workspace {})",
            Bytes(self.device_bytes),
            Bytes(self.weight_bytes),
            Bytes(self.workspace_bytes)
        )?;
        if self.host_bytes > 0 {
            write!(f, "host memory: {}", Bytes(self.host_bytes))?;
            let waiting = [("frames", self.past_bytes), ("weights", self.waiting_weight_bytes)];
            let waiting = waiting.iter().filter(|(_, bytes)| *bytes > 0);
            let waiting: Vec<String> =
                waiting.map(|(what, bytes)| format!("{what} that wait there {}", Bytes(*bytes))).collect();
            match waiting.is_empty() {
                true => writeln!(f)?,
                false => writeln!(f, " ({}; {} move per frame)", waiting.join(", "), Bytes(self.moved_per_frame))?,
            }
        }
        let chunks = self.chunk_frames.iter().zip(&self.anew_frames).map(|(frames, anew)| match anew {
            1.. => format!("{frames} ({anew} of them made anew in bands)"),
            _ => frames.to_string(),
        });
        let chunks: Vec<String> = chunks.collect();
        writeln!(
            f,
            "slices of {} latent frames; frames at a time in each level: {}",
            self.slice_frames,
            chunks.join(", ")
        )?;
        if self.seconds > 0.0 {
            writeln!(f, "time: about {}", Seconds(self.seconds))?;
        }
        if self.exact {
            write!(f, "untiled: exact")
        } else {
            let ((rows, columns), (height, width)) = (self.tiles, self.tile_size);
            write!(f, "tiled: not exact; {rows} x {columns} tiles of {width} x {height}, overlap {}", self.tile_overlap)
        }
    }
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
