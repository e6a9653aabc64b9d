//! The operations of a schedule. Planner, runner and backends use the same types; only the [`Location`] differs.
//!
//! A new operation is a type and a variant of [`Op`] here, an `emit` in `plan/schedule`, a cost in `plan/cost`, and a
//! kernel behind `Backend::run`.

use super::{
    AddOp, CacheFormat, CachedFrame, ConvLayout, FrameRef, FrameShape, LayerId, Location, PairSlabs, PoolOp, Prologue,
    SplitColumns,
};
use crate::error::Result;

/// Operations run one after the other. A slot may be reused as soon as its last reader has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op<L: Location> {
    Load(LoadOp<L>),
    Fetch(FetchOp<L>),
    Conv(ConvOp<L>),
    BandedConv(Box<BandedConvOp<L>>),
    Normalise(NormaliseOp<L>),
    Attention(AttentionOp<L>),
    Pool(PoolOp<L>),
    Add(AddOp<L>),
    Blend(BlendOp<L>),
    Store(StoreOp<L>),
}

/// Input frame `frame` of clip `batch`: the part that work item `item` computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOp<L: Location> {
    pub item: usize,
    pub batch: u64,
    pub frame: u64,
    pub into: L::Device,
}

/// Copies a layer's offloaded weights to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchOp<L: Location> {
    pub layer: LayerId,
    pub into: FetchedWeights<L>,
}

/// Offloaded weights on the device: the first `slabs` slabs. Later slabs serve the first frames of a clip only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchedWeights<L: Location> {
    pub at: L::Device,
    pub slabs: u64,
}

/// One summand of an output frame: an input frame and the slab it is convolved with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term<L: Location> {
    pub frame: L::Device,
    pub slab: u8,
}

/// One output frame of a convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvFrame<L: Location> {
    /// In the order of the sum. A shortcut comes last.
    pub terms: Vec<Term<L>>,
    /// Which of the layout's bias vectors.
    pub bias: u8,
    /// A frame of the output's shape to add.
    pub residual: Option<L::Device>,
    pub out: L::Device,
}

/// Frames of an operation that are computed together, by their indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameUnit {
    Single(usize),
    /// The first and the second frame of a pair, if they are there: see [`PairSlabs`].
    Pair([Option<usize>; 2]),
}

impl FrameUnit {
    /// The units of `frames`, in their order.
    pub fn of<L: Location>(layout: &ConvLayout, frames: &[ConvFrame<L>]) -> Vec<FrameUnit> {
        let Some(PairSlabs { shared: [a, b], own: [first, second] }) = layout.pairs else {
            return (0..frames.len()).map(FrameUnit::Single).collect();
        };
        let has_slabs = |frame: &ConvFrame<L>, slabs: [u8; 3]| {
            let main = frame.terms.iter().map(|term| term.slab).filter(|slab| u64::from(*slab) < layout.slabs);
            main.eq(slabs)
        };
        let mut units: Vec<FrameUnit> = Vec::new();
        for (index, frame) in frames.iter().enumerate() {
            if has_slabs(frame, [first, a, b]) {
                units.push(FrameUnit::Pair([Some(index), None]));
            } else if !has_slabs(frame, [a, b, second]) {
                units.push(FrameUnit::Single(index));
            } else {
                let shared =
                    |index: usize, term: usize| frames[index].terms[term..term + 2].iter().map(|term| term.frame);
                match units.last_mut() {
                    Some(FrameUnit::Pair([Some(first), second @ None])) if shared(*first, 1).eq(shared(index, 0)) => {
                        *second = Some(index);
                    }
                    _ => units.push(FrameUnit::Pair([None, Some(index)])),
                }
            }
        }
        units
    }
}

/// A convolution with everything around it: norm and SiLU before it if the device fuses them; bias, residual and norm
/// statistics after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvOp<L: Location> {
    pub layer: LayerId,
    pub layout: ConvLayout,
    /// Where the weights are, if they are offloaded.
    pub weights: Option<FetchedWeights<L>>,
    /// Shape of the input frames. A shortcut's input has the output's shape but for its channels.
    pub input: FrameShape,
    pub frames: Vec<ConvFrame<L>>,
    /// Whether to store norm statistics with each output frame.
    pub statistics: bool,
    pub partial_sums: PartialSums<L>,
}

/// Partial sums: products of earlier input frames, kept in f32 in place of those frames. They are the first terms of
/// their sums, so the bits do not depend on where launches end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartialSums<L: Location> {
    /// What the first output frames of the operation start from.
    pub before: Option<L::Device>,
    pub after: Option<PartialSumsOut<L>>,
}

/// What an operation leaves for the outputs of the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartialSumsOut<L: Location> {
    /// Of each pending output, the terms that this operation adds.
    pub pending: Vec<Vec<Term<L>>>,
    pub into: L::Device,
}

impl<L: Location> PartialSums<L> {
    pub const NONE: PartialSums<L> = PartialSums { before: None, after: None };

    pub fn is_none(&self) -> bool {
        self.before.is_none() && self.after.is_none()
    }
}

/// One summand of an output frame of a banded convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandTerm {
    /// Which of the operation's inputs.
    pub input: usize,
    /// Whether a fresh input is read rounded, as the cache will store it. Cached inputs are rounded already: theirs is false.
    pub is_rounded: bool,
    pub slab: u8,
}

/// The last summand of an output frame: an input of another shape, which is not normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortcut<L: Location> {
    pub from: FrameRef<L>,
    pub slab: u8,
}

/// One output frame of a banded convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandedFrame<L: Location> {
    /// In the order of the sum.
    pub terms: Vec<BandTerm>,
    pub shortcut: Option<Shortcut<L>>,
    pub bias: u8,
    pub residual: Option<L::Device>,
    /// A rematerialised output is computed for its statistics only.
    pub out: FrameRef<L>,
}

/// Where an input of a banded convolution comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BandSource<L: Location> {
    /// The causal cache: normalised, in the format of the cache, without statistics.
    Cached(CachedFrame<L>),
    /// A frame that is normalised per band. Without a norm it is read in place.
    Fresh(FrameRef<L>),
}

/// One input frame of a banded convolution, and what becomes of it beside the sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandInput<L: Location> {
    pub from: BandSource<L>,
    /// Whether a term reads a fresh frame as the cache stores it.
    pub is_rounded: bool,
    /// Where a fresh frame enters the causal cache. It may take the place of a cached input.
    pub cached_to: Option<CachedFrame<L>>,
    /// Where the statistics of a resident fresh frame are saved: it belongs to a recomputed cache.
    pub statistics_to: Option<L::Device>,
}

impl<L: Location> BandInput<L> {
    pub fn cached(frame: CachedFrame<L>) -> BandInput<L> {
        BandInput { from: BandSource::Cached(frame), is_rounded: false, cached_to: None, statistics_to: None }
    }

    pub fn fresh(frame: FrameRef<L>) -> BandInput<L> {
        BandInput { from: BandSource::Fresh(frame), is_rounded: false, cached_to: None, statistics_to: None }
    }
}

/// A convolution that runs in bands of rows, so that its normalised input never exists whole on the device. Offloaded
/// frames are streamed per band; rematerialised ones are computed per band.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandedConvOp<L: Location> {
    pub layer: LayerId,
    pub layout: ConvLayout,
    pub weights: Option<FetchedWeights<L>>,
    pub input: FrameShape,
    /// Oldest first, so cached frames come before fresh ones.
    pub inputs: Vec<BandInput<L>>,
    /// How the cache divides the columns of its frames, and how it stores them.
    pub columns: SplitColumns,
    pub format: CacheFormat,
    pub frames: Vec<BandedFrame<L>>,
    pub rematerialise: Option<Rematerialise<L>>,
    pub statistics: bool,
}

/// How to compute the rematerialised inputs of an operation: by another layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rematerialise<L: Location> {
    pub layer: LayerId,
    pub layout: ConvLayout,
    pub input: FrameShape,
    /// Of a layer with a norm, every frame that terms name: each band normalises the rows it needs. They have the shape
    /// of the operation's input. Without a norm frames are read in place.
    pub block_inputs: Vec<L::Device>,
    pub frames: Vec<RematerialisedFrame<L>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RematerialisedFrame<L: Location> {
    pub terms: Vec<Term<L>>,
    pub bias: u8,
}

/// A part of a band buffer: rows of one frame. Numbers are those of the operation's inputs and output frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BandPart {
    /// A block input, normalised to rematerialise others. By its number in [`Rematerialise`].
    BlockInput(usize),
    /// The host columns of a cached frame, as the cache stores them.
    HostColumns(usize),
    /// An input with its halo, as terms read it: normalised, or restored from the cache.
    Input(usize),
    /// The same of a rematerialised input.
    Rematerialised(usize),
    /// An input as the cache would give it back.
    Rounded(usize),
    /// The host columns of a new cached frame in 8 bits.
    NewHostColumns(usize),
    /// The input of an output frame's shortcut.
    Shortcut(usize),
    /// An output frame that goes to host memory.
    Output(usize),
    /// Output frames that are computed for their statistics. None is read, so they share it.
    StatisticsOutput,
}

/// What the sizes of a band's parts depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BandShape {
    pub layout: ConvLayout,
    pub input: FrameShape,
    pub columns: SplitColumns,
    pub format: CacheFormat,
}

impl<L: Location> BandedConvOp<L> {
    pub fn band_shape(&self) -> BandShape {
        BandShape { layout: self.layout, input: self.input, columns: self.columns, format: self.format }
    }

    pub fn has_norm(&self) -> bool {
        self.layout.prologue != Prologue::None
    }

    /// The parts of a band buffer, in their order there. Frames have one if they are normalised, or not whole on the
    /// device.
    pub fn band_parts(&self) -> impl Iterator<Item = BandPart> + '_ {
        let block_inputs = self.rematerialise.iter().flat_map(|by| 0..by.block_inputs.len());
        // Without a norm all inputs are read in place.
        let inputs = || self.inputs.iter().enumerate().filter(|_| self.has_norm());
        let is_u8 = self.format == CacheFormat::U8;
        let host_columns = self.cached().filter(|(_, cached)| cached.host.is_some());
        let whole = inputs().filter_map(move |(i, input)| match input.from {
            BandSource::Cached(_) => is_u8.then_some(BandPart::Input(i)),
            BandSource::Fresh(FrameRef::Rematerialised { .. }) => Some(BandPart::Rematerialised(i)),
            BandSource::Fresh(_) => Some(BandPart::Input(i)),
        });
        let rounded = inputs().filter(|(_, input)| input.is_rounded);
        let new_host_columns = self.cache_writes().filter(move |(_, to)| is_u8 && to.host.is_some());
        let frames = || self.frames.iter().enumerate();
        let is_streamed = |shortcut: &Shortcut<L>| !matches!(shortcut.from, FrameRef::Resident(_));
        let shortcuts = frames().filter(move |(_, frame)| frame.shortcut.as_ref().is_some_and(is_streamed));
        let outputs = frames().filter(|(_, frame)| frame.out.is_offloaded());
        let for_statistics = self.frames.iter().find(|frame| frame.out.is_rematerialised());
        (block_inputs.map(BandPart::BlockInput))
            .chain(host_columns.map(|(i, _)| BandPart::HostColumns(i)))
            .chain(whole)
            .chain(rounded.map(|(i, _)| BandPart::Rounded(i)))
            .chain(new_host_columns.map(|(i, _)| BandPart::NewHostColumns(i)))
            .chain(shortcuts.map(|(i, _)| BandPart::Shortcut(i)))
            .chain(outputs.map(|(i, _)| BandPart::Output(i)))
            .chain(for_statistics.map(|_| BandPart::StatisticsOutput))
    }

    /// Inputs from the causal cache, with their numbers.
    pub fn cached(&self) -> impl Iterator<Item = (usize, CachedFrame<L>)> + '_ {
        self.inputs.iter().enumerate().filter_map(|(i, input)| match input.from {
            BandSource::Cached(frame) => Some((i, frame)),
            BandSource::Fresh(_) => None,
        })
    }

    /// Fresh inputs, with their numbers.
    pub fn fresh(&self) -> impl Iterator<Item = (usize, FrameRef<L>)> + '_ {
        self.inputs.iter().enumerate().filter_map(|(i, input)| match input.from {
            BandSource::Cached(_) => None,
            BandSource::Fresh(frame) => Some((i, frame)),
        })
    }

    /// Inputs that enter the causal cache, with their numbers.
    pub fn cache_writes(&self) -> impl Iterator<Item = (usize, CachedFrame<L>)> + '_ {
        self.inputs.iter().enumerate().filter_map(|(i, input)| Some((i, input.cached_to?)))
    }

    /// How many frames are rematerialised for it, shortcuts included.
    pub fn rematerialised_frames(&self) -> usize {
        let shortcuts = self.frames.iter().filter_map(|frame| frame.shortcut.map(|shortcut| shortcut.from));
        self.fresh().map(|(_, from)| from).chain(shortcuts).filter(FrameRef::is_rematerialised).count()
    }
}

/// Norm, and SiLU if the layout has it, of a convolution's input. Statistics are those stored with the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormaliseOp<L: Location> {
    /// The convolution whose norm it is.
    pub layer: LayerId,
    pub layout: ConvLayout,
    pub weights: Option<FetchedWeights<L>>,
    pub shape: FrameShape,
    /// (input, output) of each frame, which may be the same.
    pub frames: Vec<(L::Device, L::Device)>,
}

/// `out = softmax(q k^T) v` over the pixels of each frame. The input has q, k and v side by side in 3 x `channels`
/// channels; the usual scale is folded into q.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionOp<L: Location> {
    /// Shape of an output frame.
    pub shape: FrameShape,
    /// (input, output) of each frame.
    pub frames: Vec<(L::Device, L::Device)>,
}

/// Adds a finished frame of a tile to the whole frame. The first tile clears it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlendOp<L: Location> {
    pub item: usize,
    pub from: L::Device,
    pub into: L::Device,
    pub clear: bool,
}

/// A finished frame goes to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreOp<L: Location> {
    pub batch: u64,
    pub frame: u64,
    pub from: L::Device,
}

/// What lies at a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// A frame of activations, with its statistics on the device.
    Frame,
    /// The statistics of a frame that is not on the device.
    Statistics,
    /// A frame of a causal cache, or a part of one.
    Cached,
    PartialSums,
    Weights,
}

/// What an operation does with a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// As an input of a layer.
    Input(LayerId),
    Read,
    Write,
}

/// Gives each value of an operation a location in `To`.
pub trait Relocate<From: Location, To: Location> {
    fn device(&mut self, at: From::Device, value: Value, access: Access) -> Result<To::Device>;
    fn host(&mut self, at: From::Host, value: Value, access: Access) -> Result<To::Host>;
}

/// A location in either memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place<L: Location> {
    Device(L::Device),
    Host(L::Host),
}

/// Leaves values where they are.
struct Visitor<F>(F);

impl<L: Location, F: FnMut(Place<L>, Value, Access)> Relocate<L, L> for Visitor<F> {
    fn device(&mut self, at: L::Device, value: Value, access: Access) -> Result<L::Device> {
        self.0(Place::Device(at), value, access);
        Ok(at)
    }

    fn host(&mut self, at: L::Host, value: Value, access: Access) -> Result<L::Host> {
        self.0(Place::Host(at), value, access);
        Ok(at)
    }
}

/// Relocation says which values an operation reads and writes. All that needs to know it goes through here.
impl<L: Location> Op<L> {
    /// The same operation with every value at its location in `M`.
    pub fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<Op<M>> {
        Ok(match self {
            Op::Load(op) => {
                let into = to.device(op.into, Value::Frame, Access::Write)?;
                Op::Load(LoadOp { item: op.item, batch: op.batch, frame: op.frame, into })
            }
            Op::Fetch(op) => Op::Fetch(FetchOp { layer: op.layer, into: op.into.relocate(to, Access::Write)? }),
            Op::Conv(op) => Op::Conv(op.relocate(to)?),
            Op::BandedConv(op) => Op::BandedConv(Box::new(op.relocate(to)?)),
            Op::Normalise(op) => Op::Normalise(NormaliseOp {
                layer: op.layer,
                layout: op.layout,
                weights: relocate_weights(op.weights, to)?,
                shape: op.shape,
                frames: relocate_pairs(&op.frames, to)?,
            }),
            Op::Attention(op) => {
                Op::Attention(AttentionOp { shape: op.shape, frames: relocate_pairs(&op.frames, to)? })
            }
            Op::Pool(op) => Op::Pool(op.relocate(to)?),
            Op::Add(op) => Op::Add(op.relocate(to)?),
            Op::Blend(op) => {
                let from = to.device(op.from, Value::Frame, Access::Read)?;
                let into = to.device(op.into, Value::Frame, if op.clear { Access::Write } else { Access::Read })?;
                Op::Blend(BlendOp { item: op.item, from, into, clear: op.clear })
            }
            Op::Store(op) => {
                let from = to.device(op.from, Value::Frame, Access::Read)?;
                Op::Store(StoreOp { batch: op.batch, frame: op.frame, from })
            }
        })
    }

    /// Calls `visit` with each of its values. One that it uses twice is visited twice.
    pub fn each_value(&self, visit: impl FnMut(Place<L>, Value, Access)) {
        let visited = self.relocate(&mut Visitor(visit));
        debug_assert!(visited.is_ok(), "a visitor does not fail");
    }

    /// The layer that it belongs to, and its fetched weights, if it reads weights.
    pub fn reads_weights_of(&self) -> Option<(LayerId, Option<FetchedWeights<L>>)> {
        match self {
            Op::Conv(op) => Some((op.layer, op.weights)),
            Op::BandedConv(op) => Some((op.layer, op.weights)),
            Op::Normalise(op) => Some((op.layer, op.weights)),
            Op::Fetch(_) | Op::Load(_) | Op::Attention(_) | Op::Pool(_) | Op::Add(_) | Op::Blend(_) | Op::Store(_) => {
                None
            }
        }
    }
}

impl<L: Location> FrameRef<L> {
    fn relocate<M: Location>(self, to: &mut impl Relocate<L, M>, access: Access) -> Result<FrameRef<M>> {
        Ok(match self {
            FrameRef::Resident(frame) => FrameRef::Resident(to.device(frame, Value::Frame, access)?),
            FrameRef::Offloaded { frame, statistics } => FrameRef::Offloaded {
                frame: to.host(frame, Value::Frame, access)?,
                statistics: to.device(statistics, Value::Statistics, access)?,
            },
            FrameRef::Rematerialised { index, statistics } => {
                FrameRef::Rematerialised { index, statistics: to.device(statistics, Value::Statistics, access)? }
            }
        })
    }
}

impl<L: Location> CachedFrame<L> {
    fn relocate<M: Location>(self, to: &mut impl Relocate<L, M>, access: Access) -> Result<CachedFrame<M>> {
        let resident = self.resident.map(|at| to.device(at, Value::Cached, access)).transpose()?;
        Ok(CachedFrame { resident, host: self.host.map(|at| to.host(at, Value::Cached, access)).transpose()? })
    }
}

impl<L: Location> FetchedWeights<L> {
    fn relocate<M: Location>(self, to: &mut impl Relocate<L, M>, access: Access) -> Result<FetchedWeights<M>> {
        Ok(FetchedWeights { at: to.device(self.at, Value::Weights, access)?, slabs: self.slabs })
    }
}

impl<L: Location> ConvOp<L> {
    fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<ConvOp<M>> {
        let weights = relocate_weights(self.weights, to)?;
        let sums = &self.partial_sums;
        let before = sums.before.map(|at| to.device(at, Value::PartialSums, Access::Read)).transpose()?;
        let after = match &sums.after {
            None => None,
            Some(after) => {
                let pending = after.pending.iter().map(|terms| relocate_terms(self.layer, terms, to));
                let pending = pending.collect::<Result<_>>()?;
                Some(PartialSumsOut { pending, into: to.device(after.into, Value::PartialSums, Access::Write)? })
            }
        };
        let frames = self.frames.iter().map(|frame| {
            Ok(ConvFrame {
                terms: relocate_terms(self.layer, &frame.terms, to)?,
                bias: frame.bias,
                residual: relocate_residual(frame.residual, to)?,
                out: to.device(frame.out, Value::Frame, Access::Write)?,
            })
        });
        Ok(ConvOp {
            layer: self.layer,
            layout: self.layout,
            weights,
            input: self.input,
            frames: frames.collect::<Result<_>>()?,
            statistics: self.statistics,
            partial_sums: PartialSums { before, after },
        })
    }
}

impl<L: Location> BandedConvOp<L> {
    fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<BandedConvOp<M>> {
        Ok(BandedConvOp {
            layer: self.layer,
            layout: self.layout,
            weights: relocate_weights(self.weights, to)?,
            input: self.input,
            inputs: self.inputs.iter().map(|input| input.relocate(self.layer, to)).collect::<Result<_>>()?,
            columns: self.columns,
            format: self.format,
            frames: self.frames.iter().map(|frame| frame.relocate(to)).collect::<Result<_>>()?,
            rematerialise: self.rematerialise.as_ref().map(|by| by.relocate(to)).transpose()?,
            statistics: self.statistics,
        })
    }
}

impl<L: Location> BandInput<L> {
    fn relocate<M: Location>(&self, layer: LayerId, to: &mut impl Relocate<L, M>) -> Result<BandInput<M>> {
        let statistics = |at, to: &mut _| Relocate::device(to, at, Value::Statistics, Access::Write);
        Ok(BandInput {
            from: match self.from {
                BandSource::Cached(frame) => BandSource::Cached(frame.relocate(to, Access::Read)?),
                BandSource::Fresh(frame) => BandSource::Fresh(frame.relocate(to, Access::Input(layer))?),
            },
            is_rounded: self.is_rounded,
            cached_to: self.cached_to.map(|frame| frame.relocate(to, Access::Write)).transpose()?,
            statistics_to: self.statistics_to.map(|at| statistics(at, to)).transpose()?,
        })
    }
}

impl<L: Location> BandedFrame<L> {
    fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<BandedFrame<M>> {
        let shortcut = match self.shortcut {
            Some(Shortcut { from, slab }) => Some(Shortcut { from: from.relocate(to, Access::Read)?, slab }),
            None => None,
        };
        Ok(BandedFrame {
            terms: self.terms.clone(),
            shortcut,
            bias: self.bias,
            residual: relocate_residual(self.residual, to)?,
            out: self.out.relocate(to, Access::Write)?,
        })
    }
}

impl<L: Location> Rematerialise<L> {
    fn relocate<M: Location>(&self, to: &mut impl Relocate<L, M>) -> Result<Rematerialise<M>> {
        let input = Access::Input(self.layer);
        let block_inputs = self.block_inputs.iter().map(|at| to.device(*at, Value::Frame, input));
        let block_inputs = block_inputs.collect::<Result<_>>()?;
        let frames = self.frames.iter().map(|frame| {
            Ok(RematerialisedFrame { terms: relocate_terms(self.layer, &frame.terms, to)?, bias: frame.bias })
        });
        let frames = frames.collect::<Result<_>>()?;
        Ok(Rematerialise { layer: self.layer, layout: self.layout, input: self.input, block_inputs, frames })
    }
}

fn relocate_weights<L: Location, M: Location>(
    weights: Option<FetchedWeights<L>>,
    to: &mut impl Relocate<L, M>,
) -> Result<Option<FetchedWeights<M>>> {
    weights.map(|weights| weights.relocate(to, Access::Read)).transpose()
}

fn relocate_residual<L: Location, M: Location>(
    residual: Option<L::Device>,
    to: &mut impl Relocate<L, M>,
) -> Result<Option<M::Device>> {
    residual.map(|at| to.device(at, Value::Frame, Access::Read)).transpose()
}

pub(super) fn relocate_frame<L: Location, M: Location>(
    at: L::Device,
    access: Access,
    to: &mut impl Relocate<L, M>,
) -> Result<M::Device> {
    to.device(at, Value::Frame, access)
}

fn relocate_terms<L: Location, M: Location>(
    layer: LayerId,
    terms: &[Term<L>],
    to: &mut impl Relocate<L, M>,
) -> Result<Vec<Term<M>>> {
    let terms = terms
        .iter()
        .map(|term| Ok(Term { frame: to.device(term.frame, Value::Frame, Access::Input(layer))?, slab: term.slab }));
    terms.collect()
}

fn relocate_pairs<L: Location, M: Location>(
    pairs: &[(L::Device, L::Device)],
    to: &mut impl Relocate<L, M>,
) -> Result<Vec<(M::Device, M::Device)>> {
    let mut moved = |(from, into): &(L::Device, L::Device)| {
        Ok((to.device(*from, Value::Frame, Access::Read)?, to.device(*into, Value::Frame, Access::Write)?))
    };
    pairs.iter().map(&mut moved).collect()
}
