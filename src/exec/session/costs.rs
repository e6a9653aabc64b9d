//! What things cost on a backend, in the planner's terms.

use crate::backend::Backend;
use crate::plan::Costs;
use crate::tensor::{BandFrames, ConvLayout, FrameShape, Rates};

/// What things cost on a backend.
pub struct BackendCosts<'a, B: Backend> {
    pub backend: &'a B,
    pub groups: u64,
}

impl<B: Backend> Costs for BackendCosts<'_, B> {
    fn busy_pixels(&self) -> u64 {
        self.backend.busy_pixels()
    }

    fn frame_bytes(&self, shape: FrameShape) -> u64 {
        self.backend.frame_bytes(shape, self.groups)
    }

    fn weight_bytes(&self, layout: &ConvLayout) -> u64 {
        self.backend.weight_bytes(layout)
    }

    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64 {
        self.backend.conv_scratch(layout, input, frames)
    }

    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64 {
        self.backend.attention_scratch(shape, frames)
    }

    fn fuses_norm(&self, layout: &ConvLayout) -> bool {
        self.backend.fuses_norm(layout)
    }

    fn adds_in_place(&self) -> bool {
        self.backend.adds_in_place()
    }

    fn band_bytes(&self, layout: &ConvLayout, input: FrameShape, frames: BandFrames) -> Option<u64> {
        self.backend.band_bytes(layout, input, frames)
    }

    fn sums_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        self.backend.sums_bytes(layout, input)
    }

    fn carry_bytes(&self, layout: &ConvLayout, input: FrameShape) -> Option<u64> {
        self.backend.carry_bytes(layout, input)
    }

    fn bytes_above_parts(&self, shape: FrameShape) -> u64 {
        self.backend.bytes_above_parts(shape)
    }

    fn staging_bytes(&self, shape: FrameShape) -> u64 {
        self.backend.staging_bytes(shape)
    }

    fn fade_bytes(&self, shape: FrameShape) -> u64 {
        self.backend.fade_bytes(shape)
    }

    fn block_bytes(&self, bytes: u64) -> u64 {
        self.backend.block_bytes(bytes)
    }

    fn mapping_bytes(&self, host: u64) -> u64 {
        self.backend.mapping_bytes(host)
    }

    fn rates(&self) -> Rates {
        self.backend.rates()
    }
}
