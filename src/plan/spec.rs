//! What a schedule is made from: network, batch, frame size, the end of the input, policy and tiles.
//!
//! Owns the division of a job into work items. Knows no memory.

use std::sync::Arc;

use super::policy::SchedulePolicy;
use super::tiles::Grid;
use crate::ir::FrameShape;
use crate::model::{Cone, Direction, Network};

/// Which work item runs next. A work item is one tile of one clip; without tiles, a clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemOrder {
    /// One item runs to its end before the next starts. Only one item's caches exist at a time, but with tiles every
    /// frame of the clip is kept until its last tile.
    ItemByItem,
    /// All items run a slice before any starts the next. Frames leave slice by slice, but every item keeps its caches.
    SliceBySlice,
}

/// Everything that decides a schedule.
#[derive(Debug, Clone)]
pub struct ScheduleSpec {
    pub network: Arc<Network>,
    /// The frames that each layer computes.
    pub cone: Arc<Cone>,
    pub batch: u64,
    /// Where the input ends, in frames of the clip; `None` for a stream.
    pub end: Option<u64>,
    /// The whole input frame, padded to the network's units.
    pub input: FrameShape,
    pub policy: Arc<SchedulePolicy>,
    pub grid: Option<Arc<Grid>>,
    pub order: ItemOrder,
}

/// The part of the image that a work item computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub top: u64,
    pub left: u64,
    pub shape: FrameShape,
}

impl ScheduleSpec {
    /// What a tile reads; `None` is the whole image.
    pub fn input_region(&self, tile: Option<usize>) -> Region {
        self.region(tile, self.network.latent_scale(), self.input)
    }

    /// What a tile makes.
    pub fn output_region(&self, tile: Option<usize>) -> Region {
        let scale = self.network.geometry.scale() / self.network.latent_scale();
        self.region(tile, scale, self.network.output_shape(self.input))
    }

    /// A tile's part of a frame of shape `whole`, which has `scale` rows for each row of latent.
    fn region(&self, tile: Option<usize>, scale: u64, whole: FrameShape) -> Region {
        let (Some(grid), Some(tile)) = (&self.grid, tile) else { return Region { top: 0, left: 0, shape: whole } };
        let (rows, columns) = grid.spans(tile);
        let shape = FrameShape::new(rows.len() * scale, columns.len() * scale, whole.channels);
        Region { top: rows.start * scale, left: columns.start * scale, shape }
    }

    /// The largest part of a frame that a work item computes. Only the last tiles of an axis may be smaller.
    pub fn largest_tile(&self) -> FrameShape {
        self.input_region(self.tile_of(0)).shape
    }

    /// The most activations that a load stages. A tile may begin and end within pixels of the host's packed latents,
    /// which are staged whole.
    pub fn largest_load(&self) -> FrameShape {
        let side = match self.network.direction {
            Direction::Encode => 1,
            Direction::Decode => self.network.geometry.packing,
        };
        let touched = |length: u64, all: u64| ((length + 2 * (side - 1)) / side * side).min(all);
        let tile = self.largest_tile();
        let (height, width) = (touched(tile.height, self.input.height), touched(tile.width, self.input.width));
        FrameShape { height, width, ..tile }
    }

    /// Where the first slice ends. If it is known where the input ends, a shorter slice comes first: it has no cache
    /// yet that would have to move for few frames.
    pub fn first_slice_end(&self) -> u64 {
        let (slice, start) = (self.policy.slice, self.slices_start());
        let first = self.end.map_or(0, |end| self.network.padded_frames(end).saturating_sub(start) % slice);
        start + if first == 0 { slice } else { first }
    }

    /// Slices end whole numbers of latent frames after this frame. The first slice may have one more, or less.
    pub fn slices_start(&self) -> u64 {
        let (first, rate) = (self.cone.first_input, self.network.latent_rate());
        1 + first.saturating_sub(1) / rate * rate
    }

    /// Slices before the first one that makes an output frame. 0 at the beginning of a clip.
    pub fn filling_slices(&self) -> usize {
        let missing = self.cone.fill_end.saturating_sub(self.first_slice_end());
        missing.div_ceil(self.policy.slice) as usize
    }

    /// Whether more than `slices` follow those that fill the cone, as in every stream.
    pub fn is_longer_than(&self, slices: usize) -> bool {
        let all = |end: u64| end.saturating_sub(self.slices_start()).div_ceil(self.policy.slice).max(1);
        self.end.is_none_or(|end| all(end) > (self.filling_slices() + slices) as u64)
    }

    /// Whether work items take turns within a slice.
    pub fn is_interleaved(&self) -> bool {
        self.order == ItemOrder::SliceBySlice && self.tiles() as u64 * self.batch > 1
    }

    /// Tiles of a clip; 1 without tiles.
    pub fn tiles(&self) -> usize {
        self.grid.as_ref().map_or(1, |grid| grid.tiles())
    }

    /// Which tile of its clip a work item is.
    pub fn tile_of(&self, item: usize) -> Option<usize> {
        self.grid.as_ref().map(|_| item % self.tiles())
    }

    /// The same for one clip. Clips that run one after the other need the same memory.
    pub fn one_clip(&self) -> ScheduleSpec {
        let batch = if self.order == ItemOrder::ItemByItem { 1 } else { self.batch };
        ScheduleSpec { batch, ..self.clone() }
    }
}
