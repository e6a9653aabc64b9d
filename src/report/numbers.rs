//! Plans in numbers.

use std::ops::Range;

use crate::ir::{CacheFormat, Rates, Shape};
use crate::model::{Direction, FrameRange};
use crate::plan::{Form, Plan};

/// What a job takes. The run takes exactly this.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanReport {
    pub direction: Direction,
    /// What bits depend on, beside the input: device, instructions and precision. Empty until a session says it.
    pub arithmetic: String,
    /// The name of a device that is not here, if the plan is for one: an estimate by its published rates.
    pub absent: Option<&'static str>,
    pub range: FrameRange,
    pub input: Shape,
    pub output: Shape,
    /// Device memory in all. On the CPU this is host memory.
    pub device_bytes: u64,
    /// Host memory beside it; 0 on the CPU, where `device_bytes` is host memory already.
    pub host_bytes: u64,
    /// The part of `host_bytes` for offloaded frames.
    pub offloaded_bytes: u64,
    /// Bytes from and to host memory per output frame, weights included.
    pub moved_per_frame: u64,
    /// About how long the job takes; 0 for a stream.
    pub seconds: f64,
    /// The parts of `device_bytes`.
    pub weight_bytes: u64,
    /// The part of `host_bytes` for offloaded weights.
    pub offloaded_weight_bytes: u64,
    pub workspace_bytes: u64,
    /// Latent frames per slice. The first slice has one more.
    pub slice_frames: u64,
    /// Frames per chunk of each stage.
    pub chunk_frames: Vec<u64>,
    /// Of these, how many are rematerialised for each reader.
    pub rematerialised_frames: Vec<u64>,
    /// And of these, how many hidden frames of a block are.
    pub rematerialised_hidden: Vec<u64>,
    /// Rows and columns of tiles; (1, 1) when untiled.
    pub tiles: (u64, u64),
    /// Size and overlap of a tile in pixels; the whole image and 0 when untiled.
    pub tile_size: (u64, u64),
    pub tile_overlap: u64,
    /// Same numbers as the authors' implementation, untiled.
    pub exact: bool,
    pub cache: CacheFormat,
    /// Those that `seconds` follows from. The text ends with them.
    pub rates: Rates,
    /// How several devices divide the job; bytes above are their sums, seconds those of the one that takes longest.
    pub division: Option<DeviceDivision>,
}

/// How several devices divide a job.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceDivision {
    pub devices: Vec<DeviceReport>,
    /// The share of all devices' time that is neither work of cuts nor waiting for the slowest.
    pub efficiency: f64,
    /// Whether the devices do not all give the same bits.
    pub mixed: bool,
    /// Output frames of a round, for a stream.
    pub round: Option<u64>,
}

/// Clips of a batch, and output frames of each, that one device computes in one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub clips: Range<u64>,
    pub frames: Range<u64>,
}

impl Part {
    pub fn clip_count(&self) -> u64 {
        self.clips.end - self.clips.start
    }

    pub fn frame_count(&self) -> u64 {
        self.frames.end - self.frames.start
    }

    /// Frames of all its clips.
    pub fn all_frames(&self) -> u64 {
        self.clip_count() * self.frame_count()
    }
}

/// What one of several devices does.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceReport {
    pub device: String,
    pub parts: Vec<Part>,
    pub seconds: f64,
    /// How long it took; 0 before a run.
    pub measured_seconds: f64,
    pub device_bytes: u64,
    pub host_bytes: u64,
    /// Why it does nothing, if it cannot.
    pub unused: Option<String>,
}

impl PlanReport {
    pub fn is_tiled(&self) -> bool {
        self.tiles != (1, 1)
    }
}

impl Plan {
    /// What the host is told.
    pub fn report(&self) -> PlanReport {
        let (network, policy) = (&self.spec.network, &self.spec.policy);
        let (end, cone, image) = (self.spec.end, &self.spec.cone, self.image);
        let inputs = end.map_or(0, |end| end - cone.first_input);
        let input = Shape::new(self.spec.batch, image.channels, inputs, image.height, image.width);
        let frames = end.map_or(0, |end| cone.output_frames(network, end));
        let image = match network.direction {
            Direction::Encode => self.spec.input,
            Direction::Decode => network.output_shape(self.spec.input),
        };
        let image = (image.height * network.geometry.patch, image.width * network.geometry.patch);
        let grid = self.spec.grid.as_deref();
        // A cache that nothing is offloaded from is never in 8 bits: a still image has none.
        let mut layers = network.layers.iter().zip(&policy.layers);
        let rounds = layers.any(|(layer, own)| layer.cache == CacheFormat::U8 && own.form == Form::Banded);
        let cache = if rounds { CacheFormat::U8 } else { CacheFormat::Exact };
        let stages = 0..network.stages.len();
        PlanReport {
            direction: network.direction,
            arithmetic: String::new(),
            absent: None,
            range: cone.range,
            input,
            output: Shape { frames, ..network.output(Shape { frames: 1, ..input }) },
            device_bytes: self.device_bytes(),
            host_bytes: self.host_bytes(),
            offloaded_bytes: self.pinned().offloaded,
            moved_per_frame: self.estimate.moved.checked_div(frames).unwrap_or(0),
            seconds: end.map_or(0.0, |_| self.estimate.seconds),
            weight_bytes: self.weights.device(),
            offloaded_weight_bytes: self.weights.host,
            workspace_bytes: self.workspace.saturating_add(self.mapping),
            slice_frames: policy.slice / network.latent_rate(),
            chunk_frames: policy.chunks.clone(),
            rematerialised_frames: stages.clone().map(|stage| policy.rematerialised(network, stage)).collect(),
            rematerialised_hidden: stages.map(|stage| policy.rematerialised_hidden(network, stage)).collect(),
            tiles: grid.map_or((1, 1), |g| (g.rows.spans.len() as u64, g.columns.spans.len() as u64)),
            tile_size: grid.map_or(image, |g| (g.size.height.min(image.0), g.size.width.min(image.1))),
            tile_overlap: grid.map_or(0, |g| g.size.overlap),
            exact: self.is_untiled() && cache == CacheFormat::Exact,
            cache,
            rates: self.rates,
            division: None,
        }
    }
}
