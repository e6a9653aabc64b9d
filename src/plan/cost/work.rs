//! Arithmetic of a job, for progress and estimates: multiplications of the steady state, in the folded network.

use crate::ir::{FrameShape, LayerId, Location, Op, Window};
use crate::model::{Cone, Network};
use crate::plan::spec::ScheduleSpec;

/// Multiplications for one output frame of a layer, away from the start of the clip.
pub fn layer_work(network: &Network, layer: LayerId, input: FrameShape) -> u64 {
    frame_work(network, layer, input, network.layers[layer].time.steady_products())
}

/// The same for an output frame of so many terms.
pub fn frame_work(network: &Network, layer: LayerId, input: FrameShape, terms: u64) -> u64 {
    let layout = &network.layers[layer].layout;
    let shortcut = layout.shortcut.unwrap_or(0) * layout.window.output(input, 1).pixels();
    let taps = layout.window.taps() * layout.cin * terms;
    let pixels = input.pixels() / if layout.window == Window::Down { 4 } else { 1 };
    taps.saturating_mul(pixels).saturating_add(shortcut).saturating_mul(layout.cout)
}

fn attention_work(shape: FrameShape) -> u64 {
    shape.pixels().saturating_mul(shape.pixels()).saturating_mul(2 * shape.channels)
}

/// What an operation counts towards the whole. Rematerialised frames do not count.
pub fn op_work<L: Location>(op: &Op<L>, network: &Network) -> u64 {
    match op {
        Op::Conv(conv) => layer_work(network, conv.layer, conv.input).saturating_mul(conv.frames.len() as u64),
        Op::BandedConv(conv) => layer_work(network, conv.layer, conv.input).saturating_mul(conv.frames.len() as u64),
        Op::Attention(attention) => attention_work(attention.shape).saturating_mul(attention.frames.len() as u64),
        Op::Load(_) | Op::Fetch(_) | Op::Normalise(_) | Op::Pool(_) | Op::Add(_) | Op::Blend(_) | Op::Store(_) => 0,
    }
}

/// The work of all operations for input that ends at frame `end`. 128 bits: long clips pass 2^64.
pub fn work(spec: &ScheduleSpec, end: u64) -> u128 {
    let tiles = spec.tile_shapes().into_iter();
    let clip: u128 =
        tiles.map(|(input, tiles)| cone_work(&spec.network, &spec.cone, input, end) * u128::from(tiles)).sum();
    clip * u128::from(spec.batch)
}

/// The work of a cone of one clip with frames of this shape.
pub fn cone_work(network: &Network, cone: &Cone, input: FrameShape, end: u64) -> u128 {
    let shapes = network.input_shapes(input);
    let mut total = 0;
    for (stage, end) in network.stages.iter().zip(cone.stage_ends(network, end)) {
        let of = |layer: LayerId| {
            let attends = if network.layers[layer].attends { attention_work(shapes[layer]) } else { 0 };
            let work = u128::from(layer_work(network, layer, shapes[layer])) + u128::from(attends);
            u128::from(network.layers[layer].time.computed(&(cone.first(layer)..end))) * work
        };
        total += stage.layers.clone().map(of).sum::<u128>();
    }
    total
}
