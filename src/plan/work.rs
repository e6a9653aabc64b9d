//! How much arithmetic a job is, for progress bars: multiplications of the steady state, in the folded network.

use super::job::Layout;
use super::step::Step;
use crate::model::{Block, LayerId, Network};
use crate::tensor::FrameShape;

/// Multiplications for one output frame of a layer, away from the start of the clip.
pub(super) fn layer_work(network: &Network, layer: LayerId, input: FrameShape) -> u64 {
    let layer = &network.layers[layer];
    let layout = &layer.layout;
    let terms = layer.time.recipe(u64::from(u16::MAX)).terms().len() as u64;
    let shortcut = layout.shortcut.unwrap_or(0) * layout.window.output(input, 1).pixels();
    let taps = layout.window.taps() * layout.cin * terms;
    let pixels = input.pixels() / if layout.window == crate::tensor::Window::Down { 4 } else { 1 };
    (taps * pixels + shortcut) * layout.cout
}

fn attention_work(shape: FrameShape) -> u64 {
    2 * shape.pixels() * shape.pixels() * shape.channels
}

impl Step {
    /// What counts towards the whole: what is made anew on the way does not.
    pub fn work(&self, network: &Network) -> u64 {
        match self {
            Step::Conv { layer, input, frames, .. } => layer_work(network, *layer, *input) * frames.len() as u64,
            Step::Attention { shape, frames } => attention_work(*shape) * frames.len() as u64,
            Step::Carrying(step) => layer_work(network, step.layer, step.input) * step.frames.len() as u64,
            Step::Banded(banded) => layer_work(network, banded.layer, banded.input) * banded.frames.len() as u64,
            Step::Load { .. }
            | Step::Fetch { .. }
            | Step::Normalise { .. }
            | Step::Blend { .. }
            | Step::Store { .. } => 0,
        }
    }
}

impl Layout {
    /// The work of all steps for clips of `frames` input frames.
    pub fn work(&self, frames: u64) -> u64 {
        let tiles = self.grid.as_ref().map_or(vec![None], |grid| (0..grid.tiles()).map(Some).collect());
        let clip: u64 = tiles.into_iter().map(|tile| self.region_work(self.regions(tile).0.shape, frames)).sum();
        clip * self.batch
    }

    fn region_work(&self, input: FrameShape, frames: u64) -> u64 {
        let network = &*self.network;
        let shapes = network.input_shapes(input);
        let of = |layer: LayerId| layer_work(network, layer, shapes[layer]);
        let mut total = 0;
        for (stage, count) in network.stages.iter().zip(network.stage_frames(frames)) {
            let blocks = stage.blocks.iter().map(|block| match *block {
                Block::Residual { first, second } => of(first) + of(second),
                Block::Attention { qkv, project } => of(qkv) + attention_work(shapes[project]) + of(project),
            });
            total += count * (of(stage.head) + blocks.sum::<u64>() + stage.tail.map_or(0, of));
        }
        total
    }
}
