//! Arithmetic of a job, for progress and estimates: multiplications of the steady state, in the folded network.

use crate::ir::{Location, Op};
use crate::model::{Network, attention_work};
use crate::plan::repeats::{ItemPlace, Purpose, work_items};
use crate::plan::spec::ScheduleSpec;

/// What an operation counts towards the whole. Rematerialised frames do not count.
pub fn op_work<L: Location>(op: &Op<L>, network: &Network) -> u64 {
    let (work, frames) = match op {
        Op::Conv(conv) => (network.layers[conv.layer].steady_work(conv.input), conv.frames.len()),
        Op::BandedConv(conv) => (network.layers[conv.layer].steady_work(conv.input), conv.frames.len()),
        Op::Attention(attention) => (attention_work(attention.shape), attention.frames.len()),
        Op::Load(_) | Op::Fetch(_) | Op::Normalise(_) | Op::Pool(_) | Op::Add(_) | Op::Blend(_) | Op::Store(_) => {
            (0, 0)
        }
    };
    work.saturating_mul(frames as u64)
}

/// The work of all operations for input that ends at frame `end`. 128 bits: long clips pass 2^64.
pub fn work(spec: &ScheduleSpec, end: u64) -> u128 {
    let of_kind = |place: &ItemPlace| {
        let input = spec.input_region(spec.tile_of(place.item)).shape;
        spec.cone.work(&spec.network, input, end) * u128::from(place.items)
    };
    work_items(Purpose::Rehearsal, spec).iter().map(of_kind).sum()
}
