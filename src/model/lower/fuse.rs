//! Fuses nodes into layers. A layer is a convolution with the norm, SiLU, attention, unfolding or nearest neighbour
//! before it, and with the addition or the 1x1x1 convolution behind it. A 1x1x1 convolution whose result is only added
//! becomes a shortcut: one more slab of the sum.

use std::sync::Arc;

use super::recipes::{Recipes, TimeRule};
use super::shapes::describe;
use crate::ir::{CacheFormat, ConvLayout, Norm, Prologue, Window};
use crate::model::graph::{Conv, FirstFrame, Folding, Graph, Node, NodeId, NodeOp, NormKind, SpaceAxis, TimeAxis};
use crate::model::network::{Layer, LayerTensors, LevelMap, LevelShortcut, NamedWeights, NormTensors, Source};

/// A layer, and the node whose value it writes.
#[derive(Debug)]
pub struct Fused {
    pub layer: Layer,
    pub node: NodeId,
}

/// The layers of a graph, in its order.
pub fn fuse(graph: &Graph, norm: Norm, patch: u64) -> Result<Vec<Fused>, String> {
    let (readers, values) = (graph.readers(), vec![None; graph.nodes().len()]);
    let mut fuser = Fuser { graph, norm, patch, readers, values, layers: Vec::new() };
    for id in 0..graph.nodes().len() {
        fuser.visit(id)?;
    }
    match fuser.values[graph.output()] {
        Some(Source::Layer(last)) if last + 1 == fuser.layers.len() => {}
        _ => return Err(format!("{} is the output, but no convolution writes it", describe(graph, graph.output()))),
    }
    if norm.groups() > 0 {
        mark_statistics(&mut fuser.layers)?;
    }
    Ok(fuser.layers)
}

/// Layers whose outputs a norm reads gather statistics. So do layers whose first frame is passed on to such a reader.
fn mark_statistics(layers: &mut [Fused]) -> Result<(), String> {
    for id in (0..layers.len()).rev() {
        let of = &layers[id].layer;
        let passes = of.statistics && of.time.rule.passes_first();
        match of.input {
            Source::Layer(from) if of.norm.is_some() || passes => layers[from].layer.statistics = true,
            Source::Input if passes => return Err(format!("layer {id} passes the input on to a norm of groups")),
            _ => {}
        }
    }
    match layers.iter().position(|fused| fused.layer.statistics && fused.layer.level.is_some()) {
        Some(id) => Err(format!("layer {id} gathers statistics before it adds a value around a level")),
        None => Ok(()),
    }
}

struct Fuser<'a> {
    graph: &'a Graph,
    norm: Norm,
    /// The geometry's.
    patch: u64,
    readers: Vec<usize>,
    /// Of each node, where its value is found, if it is not fused away.
    values: Vec<Option<Source>>,
    layers: Vec<Fused>,
}

/// What lies between a layer's source and its convolution.
struct Before {
    input: Source,
    norm: Option<NormTensors>,
    prologue: Prologue,
    attends: bool,
    enlarging: Option<Enlarging>,
}

/// How frames become twice as high and wide before a convolution.
enum Enlarging {
    Unfolding(Unfolding),
    Nearest,
}

/// A 1x1x1 convolution whose channels become pixels and frames.
struct Unfolding {
    upscale: NamedWeights,
    cin: u64,
    frames: u64,
}

impl Fuser<'_> {
    fn node(&self, id: NodeId) -> &Node {
        &self.graph.nodes()[id]
    }

    fn input_of(&self, id: NodeId) -> NodeId {
        self.node(id).inputs[0]
    }

    fn refuse<T>(&self, id: NodeId, why: &str) -> Result<T, String> {
        Err(format!("{}: {why}", describe(self.graph, id)))
    }

    fn visit(&mut self, id: NodeId) -> Result<(), String> {
        let graph = self.graph;
        match &graph.nodes()[id].op {
            NodeOp::Input => self.values[id] = Some(Source::Input),
            NodeOp::Conv(_) if !self.is_absorbed(id) && self.fuse_projection(id) => {}
            NodeOp::Conv(conv) if !self.is_absorbed(id) => {
                let layer = self.layer(id, conv)?;
                self.values[id] = Some(Source::Layer(self.layers.len()));
                self.layers.push(Fused { layer, node: id });
            }
            NodeOp::Add => self.fuse_addition(id)?,
            NodeOp::Unfold { frames, side: 1 } => self.fuse_split(id, *frames)?,
            // Their readers look back at them.
            NodeOp::Conv(_)
            | NodeOp::Norm { .. }
            | NodeOp::Silu
            | NodeOp::Attention
            | NodeOp::Unfold { .. }
            | NodeOp::Nearest { .. } => {}
            // The addition behind them looks back at them.
            NodeOp::FoldMean(_) | NodeOp::RepeatUnfold(_) => {}
            NodeOp::Patch { side } | NodeOp::Unpatch { side } => self.fuse_patch(id, *side)?,
        }
        Ok(())
    }

    /// Whether a convolution becomes a part of another layer: a shortcut, or what is unfolded.
    fn is_absorbed(&self, id: NodeId) -> bool {
        let reads = |reader: &&Node| reader.inputs.contains(&id);
        let reader = self.graph.nodes().iter().find(reads).filter(|_| self.readers[id] == 1);
        match reader.map(|reader| (&reader.op, &reader.inputs)) {
            Some((NodeOp::Unfold { side: 2, .. }, _)) => self.is_point(id),
            Some((NodeOp::Add, operands)) => self.is_point(id) && operands.iter().any(|other| self.is_main(*other)),
            _ => false,
        }
    }

    /// A 1x1x1 convolution of a value as it is.
    fn is_point(&self, id: NodeId) -> bool {
        let plain = |input: NodeId| matches!(self.node(input).op, NodeOp::Input | NodeOp::Conv(_) | NodeOp::Add);
        match &self.node(id).op {
            NodeOp::Conv(Conv { time, space, tensors, .. }) => {
                *time == TimeAxis::POINT && *space == SpaceAxis::POINT && tensors.len() == 1 && plain(self.input_of(id))
            }
            _ => false,
        }
    }

    /// A convolution that nothing but an addition reads, and that is a layer of its own.
    fn is_main(&self, id: NodeId) -> bool {
        matches!(self.node(id).op, NodeOp::Conv(_)) && self.readers[id] == 1 && !self.is_point(id)
    }

    /// A 1x1x1 convolution of what only it reads becomes a part of the convolution before it. Behind a convolution this
    /// is exact; before one, its bias would make the border differ.
    fn fuse_projection(&mut self, id: NodeId) -> bool {
        let from = self.input_of(id);
        if !self.is_point(id) || self.readers[from] != 1 || self.is_point(from) {
            return false;
        }
        let (channels, projection) = (self.node(id).channels, self.weights(id).remove(0));
        let Some(Source::Layer(at)) = self.values[from] else { return false };
        let Fused { layer, node } = &mut self.layers[at];
        let LayerTensors::Conv { conv, shortcut: None } = &layer.tensors else { return false };
        // A frame that is passed on would have to go through the matrix alone.
        if layer.addend.is_some() || layer.layout.window == Window::Point {
            return false;
        }
        layer.tensors = LayerTensors::Projected { conv: conv.clone(), projection };
        (layer.layout.cout, *node) = (channels, id);
        self.values[id] = Some(Source::Layer(at));
        true
    }

    /// Channels that become frames are a part of the convolution before them: each new frame has slabs of its own.
    fn fuse_split(&mut self, id: NodeId, split: u64) -> Result<(), String> {
        let (from, channels) = (self.input_of(id), self.node(id).channels);
        let at = match self.values[from] {
            Some(Source::Layer(at)) if self.readers[from] == 1 && self.layers[at].node == from => at,
            _ => {
                return self.refuse(id, "does not follow a convolution that only it reads; no backend computes it yet");
            }
        };
        let Fused { layer, node } = &mut self.layers[at];
        if !matches!(layer.tensors, LayerTensors::Conv { shortcut: None, .. }) || layer.layout.window != Window::Point {
            return self
                .refuse(id, "follows another kind of convolution than one over time; no backend computes it yet");
        }
        let time = Recipes::new(TimeRule { split, ..layer.time.rule });
        layer.layout = ConvLayout {
            cout: channels,
            slabs: time.slabs().len() as u64,
            biases: time.biases().len() as u64,
            first_frame_slab: time.first_frame_slab(),
            ..layer.layout
        };
        (layer.time, *node) = (Arc::new(time), id);
        self.values[id] = Some(Source::Layer(at));
        Ok(())
    }

    /// Loads and stores unshuffle pixels.
    fn fuse_patch(&mut self, id: NodeId, side: u64) -> Result<(), String> {
        let (from, input) = (self.input_of(id), matches!(self.node(id).op, NodeOp::Patch { .. }));
        let is_end = if input { from == 0 } else { id == self.graph.output() && self.readers[from] == 1 };
        if side != self.patch || !is_end || self.values[from].is_none() {
            return self.refuse(id, "patches are those of the geometry, at the side of the pixels");
        }
        self.values[id] = self.values[from];
        Ok(())
    }

    fn is_folded(&self, id: NodeId) -> bool {
        matches!(self.node(id).op, NodeOp::FoldMean(_) | NodeOp::RepeatUnfold(_))
    }

    /// The addition becomes a part of the layer that computes one of its operands.
    fn fuse_addition(&mut self, id: NodeId) -> Result<(), String> {
        let operands = [self.node(id).inputs[0], self.node(id).inputs[1]];
        let other_than = |main: NodeId| if operands[0] == main { operands[1] } else { operands[0] };
        if let Some(folded) = operands.into_iter().find(|operand| self.is_folded(*operand)) {
            return self.fuse_level(id, other_than(folded), folded);
        }
        // The later one, so that the other is there when it is added.
        let Some(main) = operands.into_iter().filter(|operand| self.is_main(*operand)).max() else {
            let main = operands[0].max(operands[1]);
            return self.fuse_level(id, main, other_than(main));
        };
        let other = other_than(main);
        let Some(Source::Layer(at)) = self.values[main] else { return self.refuse(id, "adds no layer's value") };
        let is_shortcut = self.is_absorbed(other);
        let from = if is_shortcut { self.input_of(other) } else { other };
        let Some(addend) = self.values[from] else { return self.refuse(id, "adds a value that is fused away") };
        if matches!(addend, Source::Layer(layer) if layer >= at) {
            return self.refuse(id, "adds a value that is computed after the convolution; no backend computes it yet");
        }
        let shortcut = is_shortcut.then(|| self.weights(other).remove(0));
        let cin = self.node(from).channels;
        let Fused { layer, node } = &mut self.layers[at];
        if let (Some(weights), LayerTensors::Conv { shortcut, .. }) = (shortcut, &mut layer.tensors) {
            *shortcut = Some(weights);
            layer.layout.shortcut = Some(cin);
        } else if is_shortcut {
            return self.refuse(id, "adds a 1x1x1 convolution to another kind of layer; no backend computes it yet");
        }
        (layer.addend, *node) = (Some(addend), id);
        self.values[id] = Some(Source::Layer(at));
        Ok(())
    }

    /// The addition of a value from before a level, to what only the addition reads.
    fn fuse_level(&mut self, id: NodeId, main: NodeId, around: NodeId) -> Result<(), String> {
        let at = match self.values[main] {
            Some(Source::Layer(at)) if self.readers[main] == 1 && self.layers[at].layer.level.is_none() => at,
            _ => {
                return self
                    .refuse(id, "no operand is a layer's that only this addition reads; no backend computes it yet");
            }
        };
        let from = if self.is_folded(around) { self.input_of(around) } else { around };
        let (cin, cout) = (self.node(from).channels, self.node(around).channels);
        let (map, folding, fits) = match self.node(around).op {
            NodeOp::FoldMean(by) => (LevelMap::Mean, by, by.side == 2 && cout == cin * by.frames),
            NodeOp::RepeatUnfold(by) => {
                let fits = (cout * by.frames * by.side * by.side).is_multiple_of(cin);
                (LevelMap::Repeat { side: by.side }, by, fits)
            }
            _ => (LevelMap::Repeat { side: 1 }, Folding { frames: 1, side: 1, still: false }, true),
        };
        if !fits || self.is_folded(around) && self.readers[around] != 1 {
            return self.refuse(around, "no backend computes its channels, or it has other readers");
        }
        match self.values[from] {
            Some(Source::Layer(from)) if from < at => {
                let Folding { frames: parts, still, .. } = folding;
                self.layers[at].layer.level = Some(LevelShortcut { from, map, parts, still });
                self.layers[at].node = id;
                self.values[id] = Some(Source::Layer(at));
                Ok(())
            }
            Some(Source::Input) => self.refuse(id, "adds the input around a level; no backend computes it yet"),
            Some(Source::Layer(_)) => self.refuse(id, "adds a value that is computed after the level"),
            None => self.refuse(id, "adds a value that is fused away"),
        }
    }

    fn layer(&self, id: NodeId, conv: &Conv) -> Result<Layer, String> {
        let before = self.before(self.input_of(id))?;
        let window = self.window(id, conv, before.enlarging.is_some())?;
        let cin = self.node(self.input_of(id)).channels;
        let fits = match &before.enlarging {
            // Frames of zeros come behind the unfolding, so they lack its bias.
            Some(Enlarging::Unfolding(of)) => of.cin == cin && conv.time == TimeAxis::causal(FirstFrame::Repeated),
            Some(Enlarging::Nearest) => conv.time.stride == 1,
            None => conv.time.stride <= 2,
        };
        if conv.time.kernel > 3 || !fits {
            return self.refuse(id, "no backend computes its kernel or stride in time");
        }
        if conv.tensors.len() > 1 && window != Window::Point {
            return self.refuse(id, "no backend computes a kernel of several tensors");
        }
        let unfold = match &before.enlarging {
            Some(Enlarging::Unfolding(of)) => of.frames,
            Some(Enlarging::Nearest) | None => 1,
        };
        let time = Recipes::new(TimeRule { unfold, ..TimeRule::of(conv.time) });
        if time.rule.passes_first() && (window != Window::Point || before.norm.is_some() || before.attends) {
            return self.refuse(id, "passes a frame that it does not read as it is; no backend computes it yet");
        }
        let mut weights = self.weights(id);
        let tensors = match before.enlarging {
            Some(Enlarging::Unfolding(of)) => LayerTensors::Unfolded { upscale: of.upscale, conv: weights.remove(0) },
            Some(Enlarging::Nearest) => LayerTensors::Nearest { conv: weights.remove(0) },
            None if window == Window::Point && conv.time == TimeAxis::POINT => LayerTensors::Matrices(weights),
            None => LayerTensors::Conv { conv: weights.remove(0), shortcut: None },
        };
        let layout = ConvLayout {
            cin,
            cout: self.node(id).channels,
            window,
            prologue: before.prologue,
            slabs: time.slabs().len() as u64,
            shortcut: None,
            biases: time.biases().len() as u64,
            norm: self.norm,
            pairs: None,
            first_frame_slab: time.first_frame_slab(),
        };
        Ok(Layer {
            layout,
            time: Arc::new(time),
            input: before.input,
            attends: before.attends,
            addend: None,
            level: None,
            norm: before.norm,
            tensors,
            statistics: false,
            cache: CacheFormat::Exact,
        })
    }

    fn window(&self, id: NodeId, conv: &Conv, enlarged: bool) -> Result<Window, String> {
        match (conv.space, enlarged) {
            (SpaceAxis::POINT, false) => Ok(Window::Point),
            (SpaceAxis::SAME, false) => Ok(Window::Same),
            (SpaceAxis::SAME, true) => Ok(Window::Up),
            (SpaceAxis::HALVING, false) => Ok(Window::Down),
            _ => self.refuse(id, "no backend computes its kernel, stride and padding"),
        }
    }

    /// Follows the nodes before a convolution back to a value that exists.
    fn before(&self, id: NodeId) -> Result<Before, String> {
        if let Some(input) = self.values[id] {
            return Ok(Before { input, norm: None, prologue: Prologue::None, attends: false, enlarging: None });
        }
        match &self.node(id).op {
            NodeOp::Norm { tensor, kind } => {
                let before = self.plain_before(id)?;
                Ok(Before { norm: Some(self.norm_tensors(id, tensor, *kind)?), prologue: Prologue::Norm, ..before })
            }
            NodeOp::Silu => match self.before(self.input_of(id))? {
                before if before.prologue == Prologue::Norm => Ok(Before { prologue: Prologue::NormSilu, ..before }),
                _ => self.refuse(id, "follows no norm; no backend computes it yet"),
            },
            NodeOp::Attention if matches!(self.node(self.input_of(id)).op, NodeOp::Conv(_)) => {
                Ok(Before { attends: true, ..self.plain_before(id)? })
            }
            NodeOp::Unfold { frames, side: 2 } if *frames <= 2 => {
                let wide = self.input_of(id);
                let before = self.plain_before(wide)?;
                let cin = self.node(self.input_of(wide)).channels;
                let unfolding = Unfolding { upscale: self.weights(wide).remove(0), cin, frames: *frames };
                Ok(Before { enlarging: Some(Enlarging::Unfolding(unfolding)), ..before })
            }
            NodeOp::Nearest { side: 2 } => Ok(Before { enlarging: Some(Enlarging::Nearest), ..self.plain_before(id)? }),
            _ => self.refuse(id, "no backend computes it there"),
        }
    }

    /// What lies before a node that must read a value as it is.
    fn plain_before(&self, id: NodeId) -> Result<Before, String> {
        let before = self.before(self.input_of(id))?;
        if before.prologue != Prologue::None || before.attends || before.enlarging.is_some() {
            return self.refuse(id, "no backend computes it behind another such node");
        }
        Ok(before)
    }

    fn norm_tensors(&self, id: NodeId, tensor: &str, kind: NormKind) -> Result<NormTensors, String> {
        let channels = self.node(id).channels;
        match kind {
            _ if kind.without_parameters() != self.norm => self
                .refuse(id, "its kind or number of groups is not that of the first norm; no backend computes it yet"),
            NormKind::Group { epsilon: 1e-6, .. } => {
                let (name, shape) = (tensor.to_owned(), vec![channels]);
                Ok(NormTensors::WeightAndBias(NamedWeights { name, shape, scaled: 0, scale: 1.0 }))
            }
            NormKind::Group { .. } => self.refuse(id, "no backend computes its epsilon yet"),
            NormKind::Pixel { trailing_axes } => {
                let shape = [channels].into_iter().chain(std::iter::repeat_n(1, trailing_axes)).collect();
                Ok(NormTensors::Gamma { name: format!("{tensor}.gamma"), shape })
            }
        }
    }

    fn feeds_attention(&self, id: NodeId) -> bool {
        self.graph.nodes().iter().any(|node| node.op == NodeOp::Attention && node.inputs.contains(&id))
    }

    /// The tensors of a convolution. Attention divides scores by the square root of the head's width; scaling the
    /// queries, which come first of three, does the same.
    fn weights(&self, id: NodeId) -> Vec<NamedWeights> {
        let NodeOp::Conv(conv) = &self.node(id).op else { return Vec::new() };
        let (cin, outputs) = (self.node(self.input_of(id)).channels, self.node(id).channels);
        let cout = outputs / conv.tensors.len() as u64;
        let queries = if self.feeds_attention(id) { outputs / 3 } else { 0 };
        let named = |(part, name): (u64, &String)| NamedWeights {
            name: name.clone(),
            shape: conv.weight_shape(cin, cout),
            scaled: queries.saturating_sub(part * cout).min(cout),
            scale: (queries.max(1) as f64).sqrt().recip(),
        };
        (0..).zip(&conv.tensors).map(named).collect()
    }
}
