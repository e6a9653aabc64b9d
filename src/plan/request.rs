//! What is to be planned, and the answer if nothing fits.

use std::sync::Arc;

use super::policy::{MAX_SLICE_LATENTS, SchedulePolicy};
use super::spec::{ItemOrder, ScheduleSpec};
use super::tiles::{Grid, TileSize};
use crate::ir::FrameShape;
use crate::model::{Cone, Network};

/// Tiles of all clips together that a job may have. Each is scheduled on its own.
pub const MAX_WORK_ITEMS: u64 = 1 << 14;

#[derive(Debug, Clone)]
pub struct Request {
    pub network: Arc<Network>,
    /// The frames that each layer computes.
    pub cone: Arc<Cone>,
    pub batch: u64,
    /// Input frames; of a range, those that it needs. `None` for a stream.
    pub frames: Option<u64>,
    /// A frame as the host passes it in.
    pub image: FrameShape,
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
        self.frames == Some(1)
    }

    /// Latent frames per slice, if the host sets them.
    pub fn slice_latents(&self) -> Option<u64> {
        self.slice.map(|asked| asked.min(MAX_SLICE_LATENTS))
    }

    /// Where the input ends, in frames of the clip; `None` for a stream.
    pub fn input_end(&self) -> Option<u64> {
        self.frames.map(|frames| self.cone.first_input + frames)
    }

    /// The input padded to whole latent pixels.
    pub fn input_frame(&self) -> FrameShape {
        self.network.input_frame(self.image)
    }

    /// Rows and columns of the latent.
    pub fn latent(&self) -> (u64, u64) {
        let (input, scale) = (self.input_frame(), self.network.latent_scale());
        (input.height / scale, input.width / scale)
    }

    pub fn grid(&self, size: TileSize) -> Option<Arc<Grid>> {
        let (rows, columns) = self.latent();
        Grid::new(size, rows, columns, &self.network.geometry, self.network.direction).map(Arc::new)
    }

    /// The schedule of a policy, with the tiles of `grid`.
    pub fn spec(&self, policy: Arc<SchedulePolicy>, grid: Option<Arc<Grid>>, order: ItemOrder) -> ScheduleSpec {
        ScheduleSpec {
            network: Arc::clone(&self.network),
            cone: Arc::clone(&self.cone),
            batch: self.batch,
            end: self.input_end(),
            input: self.input_frame(),
            policy,
            grid,
            order,
        }
    }

    /// Whether the requested tiles are too many to schedule.
    pub fn has_too_many_tiles(&self) -> bool {
        let tiles = |size: TileSize| self.grid(size).map_or(1, |grid| grid.tiles() as u64);
        self.tiles.is_some_and(|size| tiles(size).saturating_mul(self.batch) > MAX_WORK_ITEMS)
    }
}
