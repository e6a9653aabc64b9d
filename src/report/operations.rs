//! Names of operations, for timelines and traces.

use crate::ir::{LayerId, Location, Op};
use crate::model::Network;

/// How an operation is called, in timelines and traces.
pub fn op_name<L: Location>(op: &Op<L>, network: &Network) -> String {
    let of = |what: &str, layer: LayerId| format!("{what} {}", network.layers[layer].name());
    match op {
        Op::Load(_) => "load".into(),
        Op::Fetch(fetch) => of("fetch", fetch.layer),
        Op::Conv(conv) => of("conv", conv.layer),
        Op::BandedConv(conv) => of("banded conv", conv.layer),
        Op::Normalise(norm) => of("norm", norm.layer),
        Op::Attention(_) => "attention".into(),
        Op::Pool(_) => "pool".into(),
        Op::Add(_) => "add".into(),
        Op::Blend(_) => "blend".into(),
        Op::Store(_) => "store".into(),
    }
}

/// Frames that an operation makes.
pub fn op_frames<L: Location>(op: &Op<L>) -> usize {
    match op {
        Op::Conv(conv) => conv.frames.len(),
        Op::BandedConv(conv) => conv.frames.len(),
        Op::Normalise(norm) => norm.frames.len(),
        Op::Attention(attention) => attention.frames.len(),
        Op::Pool(pool) => pool.frames.len(),
        Op::Add(add) => add.frames.len(),
        Op::Load(_) | Op::Blend(_) | Op::Store(_) => 1,
        Op::Fetch(_) => 0,
    }
}
