//! Resolution and frame rate of every node, relative to the network's input.

use crate::model::graph::{Graph, Node, NodeId, NodeOp};

/// A ratio in lowest terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ratio {
    pub up: u64,
    pub down: u64,
}

/// Rows (and columns) and frames of a value for one row and one frame of the network's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub space: Ratio,
    pub time: Ratio,
}

impl Ratio {
    const ONE: Ratio = Ratio { up: 1, down: 1 };

    fn times(self, up: u64, down: u64) -> Ratio {
        let mut ratio = Ratio { up: self.up * up, down: self.down * down };
        for factor in [2, 3, 5, 7] {
            while ratio.up.is_multiple_of(factor) && ratio.down.is_multiple_of(factor) {
                ratio = Ratio { up: ratio.up / factor, down: ratio.down / factor };
            }
        }
        ratio
    }
}

/// The extent of every node's value. Fails where an addition joins two extents.
pub fn infer(graph: &Graph) -> Result<Vec<Extent>, String> {
    let mut extents: Vec<Extent> = Vec::with_capacity(graph.nodes().len());
    for (id, node) in graph.nodes().iter().enumerate() {
        let Some(first) = node.inputs.first() else {
            extents.push(Extent { space: Ratio::ONE, time: Ratio::ONE });
            continue;
        };
        if let Some(other) = node.inputs.iter().find(|input| extents[**input] != extents[*first]) {
            return Err(format!(
                "node {id} joins node {first} and node {other}, which differ in resolution or frame rate"
            ));
        }
        extents.push(of(node, extents[*first]));
    }
    Ok(extents)
}

fn of(node: &Node, Extent { space, time }: Extent) -> Extent {
    let (space_change, time_change) = match &node.op {
        NodeOp::Conv(conv) => ((1, conv.space.stride), (1, conv.time.stride)),
        NodeOp::Unfold { frames, side } => ((*side, 1), (*frames, 1)),
        NodeOp::RepeatUnfold(folding) => ((folding.side, 1), (folding.rate(), 1)),
        NodeOp::FoldMean(folding) => ((1, folding.side), (1, folding.rate())),
        NodeOp::Nearest { side } | NodeOp::Unpatch { side } => ((*side, 1), (1, 1)),
        NodeOp::Patch { side } => ((1, *side), (1, 1)),
        NodeOp::Input | NodeOp::Norm { .. } | NodeOp::Silu | NodeOp::Add | NodeOp::Attention => ((1, 1), (1, 1)),
    };
    Extent { space: space.times(space_change.0, space_change.1), time: time.times(time_change.0, time_change.1) }
}

/// A node in words, for errors.
pub fn describe(graph: &Graph, id: NodeId) -> String {
    let name = match &graph.nodes()[id].op {
        NodeOp::Input => "the input".into(),
        NodeOp::Conv(conv) => format!("convolution {:?}", conv.tensors.first().map_or("", String::as_str)),
        NodeOp::Norm { tensor, .. } => format!("norm {tensor:?}"),
        NodeOp::Silu => "SiLU".into(),
        NodeOp::Add => "addition".into(),
        NodeOp::Attention => "attention".into(),
        NodeOp::Unfold { .. } => "unfolding".into(),
        NodeOp::Nearest { .. } => "nearest neighbour".into(),
        NodeOp::FoldMean(_) => "mean of folded channels".into(),
        NodeOp::RepeatUnfold(_) => "unfolding of repeated channels".into(),
        NodeOp::Patch { .. } => "patches".into(),
        NodeOp::Unpatch { .. } => "pixels of patches".into(),
    };
    format!("node {id} ({name})")
}
