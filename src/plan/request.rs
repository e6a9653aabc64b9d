//! What is to be planned, and the answer if nothing fits.

use std::sync::Arc;

use super::policy::{MAX_SLICE_LATENTS, SchedulePolicy};
use super::spec::{ItemOrder, ScheduleSpec};
use super::tiles::{Grid, PixelScale, TileSize};
use crate::ir::{FrameShape, Shape};
use crate::model::{Cone, Network};

/// Tiles of all clips together that a job may have. Each is scheduled on its own.
pub const MAX_WORK_ITEMS: u64 = 1 << 14;

#[derive(Debug, Clone)]
pub struct Request {
    pub network: Arc<Network>,
    /// The frames that each layer computes.
    pub cone: Arc<Cone>,
    /// The shape that the host passes in: of a range, the frames that it needs. `frames == 0` stands for a stream.
    pub input: Shape,
    /// Device bytes for weights and workspace together.
    pub limit: u64,
    /// Bytes of host memory beside the device's.
    pub host_limit: u64,
    /// Bytes that loading the weights takes at its peak, weights included; 0 if that is no more than the weights.
    pub load_bytes: u64,
    /// Tiles that the host asks for.
    pub tiles: Option<TileSize>,
    /// Whether tiles may be used that the host did not ask for.
    pub allow_tiles: bool,
    /// The overlap of tiles that the limit forces.
    pub overlap: u64,
    /// Latent frames per slice, of which [`Request::slice_latents`] are taken, and the most frames per chunk, if the host
    /// sets them.
    pub slice: Option<u64>,
    pub chunk: Option<u64>,
}

/// Why there is no plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanError {
    Cancelled,
    /// No plan fits. Device bytes of the smallest one, and of the smallest one without tiles, of those that were tried
    /// and have enough host memory.
    TooLarge {
        smallest: Option<u64>,
        smallest_exact: Option<u64>,
    },
}

impl Request {
    pub fn is_still(&self) -> bool {
        self.input.frames == 1
    }

    /// Whether it is not known where the input ends.
    pub fn is_stream(&self) -> bool {
        self.input.frames == 0
    }

    /// Latent frames per slice, if the host sets them.
    pub fn slice_latents(&self) -> Option<u64> {
        self.slice.map(|asked| asked.min(MAX_SLICE_LATENTS))
    }

    /// Where the input ends, in frames of the clip; `None` for a stream.
    pub fn input_end(&self) -> Option<u64> {
        (!self.is_stream()).then(|| self.cone.first_input + self.input.frames)
    }

    /// The input padded to whole latent pixels.
    pub fn input_frame(&self) -> FrameShape {
        self.network.input_frame(self.input)
    }

    /// Rows and columns of the latent.
    pub fn latent(&self) -> (u64, u64) {
        let (input, scale) = (self.input_frame(), self.network.latent_scale());
        (input.height / scale, input.width / scale)
    }

    pub fn grid(&self, size: TileSize) -> Option<Arc<Grid>> {
        let scale = PixelScale { latent: self.network.geometry.space, patch: self.network.geometry.patch };
        let (rows, columns) = self.latent();
        Grid::new(size, rows, columns, scale, self.network.direction).map(Arc::new)
    }

    /// The schedule of a policy, with the tiles of `grid`.
    pub fn spec(&self, policy: Arc<SchedulePolicy>, grid: Option<Arc<Grid>>, order: ItemOrder) -> ScheduleSpec {
        ScheduleSpec {
            network: Arc::clone(&self.network),
            cone: Arc::clone(&self.cone),
            batch: self.input.batch,
            input: self.input_frame(),
            policy,
            grid,
            order,
        }
    }

    pub fn requested_tiles(&self) -> Option<Arc<Grid>> {
        self.tiles.and_then(|size| self.grid(size))
    }

    /// Tiles of all clips together.
    pub fn work_items(&self, size: TileSize) -> u64 {
        let (rows, columns) = self.latent();
        let (down, across) = size.count(rows, columns, self.network.geometry.space);
        down.saturating_mul(across).saturating_mul(self.input.batch)
    }

    /// Whether the requested tiles are too many to schedule.
    pub fn has_too_many_tiles(&self) -> bool {
        self.tiles.is_some_and(|size| self.work_items(size) > MAX_WORK_ITEMS)
    }
}
