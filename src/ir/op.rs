//! The operations of a schedule. Planner, runner and backends use the same types; only the [`Location`] differs.
//!
//! A new operation is a type and a variant of [`Op`] here, an `emit` in `plan/schedule`, a cost in `plan/cost`, and a
//! kernel behind `Backend::run`.

use super::{
    CacheFormat, CachedFrame, ConvLayout, DeviceOffset, FrameRef, FrameShape, LayerId, Location, OWN_SLABS, Offsets,
    Prologue, Relocate, SplitColumns,
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
    /// The first and the second frame of a pair, if they are there: see [`PAIR_SLABS`](super::PAIR_SLABS).
    Pair([Option<usize>; 2]),
}

impl FrameUnit {
    /// The units of `frames`, in their order.
    pub fn of<L: Location>(layout: &ConvLayout, frames: &[ConvFrame<L>]) -> Vec<FrameUnit> {
        let [first, second] = OWN_SLABS;
        let has_slabs = |frame: &ConvFrame<L>, slabs: [u8; 3]| {
            let main = frame.terms.iter().map(|term| term.slab).filter(|slab| u64::from(*slab) < layout.slabs);
            layout.pairs && main.eq(slabs)
        };
        let mut units: Vec<FrameUnit> = Vec::new();
        for (index, frame) in frames.iter().enumerate() {
            if has_slabs(frame, [first, 0, 1]) {
                units.push(FrameUnit::Pair([Some(index), None]));
            } else if !has_slabs(frame, [0, 1, second]) {
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

/// One output frame of a banded convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandedFrame<L: Location> {
    /// (input, slab) in the order of the sum. Inputs are numbered: cached frames first, then fresh ones, then those of
    /// `rounded`.
    pub terms: Vec<(usize, u8)>,
    /// Input and slab of the shortcut, the last summand.
    pub shortcut: Option<(FrameRef<L>, u8)>,
    pub bias: u8,
    pub residual: Option<L::Device>,
    /// A rematerialised output is computed for its statistics only.
    pub out: FrameRef<L>,
}

/// A convolution that runs in bands of rows, so that its normalised input never exists whole on the device. Offloaded
/// frames are streamed per band; rematerialised ones are computed per band. Without a norm, fresh frames are read in
/// place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BandedConvOp<L: Location> {
    pub layer: LayerId,
    pub layout: ConvLayout,
    pub weights: Option<FetchedWeights<L>>,
    pub input: FrameShape,
    /// The causal cache: normalised frames without statistics.
    pub cached: Vec<CachedFrame<L>>,
    /// Frames that are normalised per band, if the layer has a norm.
    pub fresh: Vec<FrameRef<L>>,
    /// Which fresh frames enter the causal cache, and where. A resident part may replace one of `cached`.
    pub cache_writes: Vec<(usize, CachedFrame<L>)>,
    pub columns: SplitColumns,
    pub format: CacheFormat,
    /// Fresh frames that are read as the cache would store them.
    pub rounded: Vec<usize>,
    /// Which resident fresh frames belong to a recomputed cache, and where their statistics are saved.
    pub statistics_writes: Vec<(usize, L::Device)>,
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
    /// Every frame that terms name, if the layer is a block's first: each band normalises the rows it needs. They have
    /// the shape of the operation's input. Empty if it is a stage's head, which has no norm.
    pub block_inputs: Vec<L::Device>,
    pub frames: Vec<RematerialisedFrame<L>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RematerialisedFrame<L: Location> {
    pub terms: Vec<Term<L>>,
    pub bias: u8,
}

/// What the band buffers of a convolution must hold, in frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct BandContents {
    /// Fresh inputs, without rematerialised ones. 0 if the layer has no norm: it reads them in place.
    pub fresh: u64,
    /// Cached frames with a host part, and the columns of that part.
    pub cached: u64,
    pub host_columns: u64,
    /// Rematerialised inputs, and the frames that are normalised to compute them.
    pub rematerialised: u64,
    pub block_inputs: u64,
    pub outputs: u64,
    /// Inputs of shortcuts that are not resident.
    pub shortcuts: u64,
    /// Outputs that are not resident. All that are computed for their statistics share one buffer.
    pub streamed_outputs: u64,
    pub format: CacheFormat,
    /// Inputs that are restored from 8 bits: cached frames, and rounded fresh ones.
    pub restored: u64,
    /// New cached frames whose host part is rounded to 8 bits.
    pub written: u64,
}

impl<L: Location> BandedConvOp<L> {
    pub fn band_contents(&self) -> BandContents {
        let mut band = BandContents { outputs: self.frames.len() as u64, ..BandContents::default() };
        if self.layout.prologue != Prologue::None {
            band.rematerialised = self.fresh.iter().filter(|frame| frame.is_rematerialised()).count() as u64;
            band.fresh = self.fresh.len() as u64 - band.rematerialised;
        }
        band.block_inputs = self.rematerialise.as_ref().map_or(0, |by| by.block_inputs.len() as u64);
        band.cached = self.cached.iter().filter(|frame| frame.host.is_some()).count() as u64;
        if band.cached > 0 {
            band.host_columns = self.columns.host_width();
        }
        let shortcuts = self.frames.iter().filter_map(|frame| frame.shortcut.as_ref());
        band.shortcuts = shortcuts.filter(|(at, _)| !matches!(at, FrameRef::Resident(_))).count() as u64;
        let offloaded = self.frames.iter().filter(|frame| frame.out.is_offloaded()).count();
        let for_statistics = self.frames.iter().any(|frame| frame.out.is_rematerialised());
        band.streamed_outputs = offloaded as u64 + u64::from(for_statistics);
        if self.format == CacheFormat::U8 {
            band.format = self.format;
            band.restored = (self.cached.len() + self.rounded.len()) as u64;
            band.written = self.cache_writes.iter().filter(|(_, to)| to.host.is_some()).count() as u64;
            if band.written > 0 {
                band.host_columns = self.columns.host_width();
            }
        }
        band
    }

    /// How many frames are rematerialised for it, shortcuts included.
    pub fn rematerialised_frames(&self) -> usize {
        let shortcuts = self.frames.iter().filter_map(|frame| frame.shortcut.map(|(at, _)| at));
        self.fresh.iter().copied().chain(shortcuts).filter(FrameRef::is_rematerialised).count()
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

impl<L: Location> Op<L> {
    /// The same operation with every frame by its offset.
    pub fn relocate(&self, to: &impl Relocate<L>) -> Result<Op<Offsets>> {
        Ok(match self {
            Op::Load(op) => {
                Op::Load(LoadOp { item: op.item, batch: op.batch, frame: op.frame, into: to.device(op.into)? })
            }
            Op::Fetch(op) => Op::Fetch(FetchOp { layer: op.layer, into: op.into.relocate(to)? }),
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
            Op::Blend(op) => Op::Blend(BlendOp {
                item: op.item,
                from: to.device(op.from)?,
                into: to.device(op.into)?,
                clear: op.clear,
            }),
            Op::Store(op) => Op::Store(StoreOp { batch: op.batch, frame: op.frame, from: to.device(op.from)? }),
        })
    }
}

impl<L: Location> FetchedWeights<L> {
    fn relocate(self, to: &impl Relocate<L>) -> Result<FetchedWeights<Offsets>> {
        Ok(FetchedWeights { at: to.device(self.at)?, slabs: self.slabs })
    }
}

impl<L: Location> ConvOp<L> {
    fn relocate(&self, to: &impl Relocate<L>) -> Result<ConvOp<Offsets>> {
        let frame = |frame: &ConvFrame<L>| -> Result<ConvFrame<Offsets>> {
            Ok(ConvFrame {
                terms: relocate_terms(&frame.terms, to)?,
                bias: frame.bias,
                residual: frame.residual.map(|at| to.device(at)).transpose()?,
                out: to.device(frame.out)?,
            })
        };
        let out = |out: &PartialSumsOut<L>| -> Result<PartialSumsOut<Offsets>> {
            let pending = out.pending.iter().map(|terms| relocate_terms(terms, to)).collect::<Result<_>>()?;
            Ok(PartialSumsOut { pending, into: to.device(out.into)? })
        };
        Ok(ConvOp {
            layer: self.layer,
            layout: self.layout,
            weights: relocate_weights(self.weights, to)?,
            input: self.input,
            frames: self.frames.iter().map(frame).collect::<Result<_>>()?,
            statistics: self.statistics,
            partial_sums: PartialSums {
                before: self.partial_sums.before.map(|at| to.device(at)).transpose()?,
                after: self.partial_sums.after.as_ref().map(out).transpose()?,
            },
        })
    }
}

impl<L: Location> BandedConvOp<L> {
    fn relocate(&self, to: &impl Relocate<L>) -> Result<BandedConvOp<Offsets>> {
        let frame = |frame: &BandedFrame<L>| -> Result<BandedFrame<Offsets>> {
            Ok(BandedFrame {
                terms: frame.terms.clone(),
                shortcut: frame.shortcut.map(|(at, slab)| Ok((at.relocate(to)?, slab))).transpose()?,
                bias: frame.bias,
                residual: frame.residual.map(|at| to.device(at)).transpose()?,
                out: frame.out.relocate(to)?,
            })
        };
        let remade = |by: &Rematerialise<L>| -> Result<Rematerialise<Offsets>> {
            let frame = |frame: &RematerialisedFrame<L>| -> Result<RematerialisedFrame<Offsets>> {
                Ok(RematerialisedFrame { terms: relocate_terms(&frame.terms, to)?, bias: frame.bias })
            };
            let block_inputs = by.block_inputs.iter().map(|at| to.device(*at)).collect::<Result<_>>()?;
            let frames = by.frames.iter().map(frame).collect::<Result<_>>()?;
            Ok(Rematerialise { layer: by.layer, layout: by.layout, input: by.input, block_inputs, frames })
        };
        let cache_writes = self.cache_writes.iter().map(|(i, at)| Ok((*i, at.relocate(to)?)));
        let statistics_writes = self.statistics_writes.iter().map(|(i, at)| Ok((*i, to.device(*at)?)));
        Ok(BandedConvOp {
            layer: self.layer,
            layout: self.layout,
            weights: relocate_weights(self.weights, to)?,
            input: self.input,
            cached: self.cached.iter().map(|cached| cached.relocate(to)).collect::<Result<_>>()?,
            fresh: self.fresh.iter().map(|fresh| fresh.relocate(to)).collect::<Result<_>>()?,
            cache_writes: cache_writes.collect::<Result<_>>()?,
            columns: self.columns,
            format: self.format,
            rounded: self.rounded.clone(),
            statistics_writes: statistics_writes.collect::<Result<_>>()?,
            frames: self.frames.iter().map(frame).collect::<Result<_>>()?,
            rematerialise: self.rematerialise.as_ref().map(remade).transpose()?,
            statistics: self.statistics,
        })
    }
}

fn relocate_weights<L: Location>(
    weights: Option<FetchedWeights<L>>,
    to: &impl Relocate<L>,
) -> Result<Option<FetchedWeights<Offsets>>> {
    weights.map(|weights| weights.relocate(to)).transpose()
}

fn relocate_terms<L: Location>(terms: &[Term<L>], to: &impl Relocate<L>) -> Result<Vec<Term<Offsets>>> {
    terms.iter().map(|term| Ok(Term { frame: to.device(term.frame)?, slab: term.slab })).collect()
}

fn relocate_pairs<L: Location>(
    pairs: &[(L::Device, L::Device)],
    to: &impl Relocate<L>,
) -> Result<Vec<(DeviceOffset, DeviceOffset)>> {
    pairs.iter().map(|(from, into)| Ok((to.device(*from)?, to.device(*into)?))).collect()
}
