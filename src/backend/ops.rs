//! The operations, as plain descriptions.

use crate::tensor::{At, BandFrames, Columns, ConvLayout, FrameShape, PastAt, Sums, View};

/// A CUDA stream of the host's. Work is ordered after what is in it, and it goes on after the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostStream(pub *mut std::ffi::c_void);

// SAFETY: a handle that the driver takes from any thread.
unsafe impl Send for HostStream {}

/// Where a frame of activations lies: an offset in bytes into the memory block of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame(pub u64);

/// One summand of an output frame: an input frame and the slab it is convolved with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Term {
    pub frame: Frame,
    pub slab: u8,
}

/// At most three frames of history and a shortcut. The order of the terms is the order of the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    terms: [Term; 4],
    len: u8,
}

impl Terms {
    pub const fn new() -> Terms {
        Terms { terms: [Term { frame: Frame(0), slab: 0 }; 4], len: 0 }
    }

    pub fn push(&mut self, term: Term) {
        self.terms[usize::from(self.len)] = term;
        self.len += 1;
    }
}

impl Default for Terms {
    fn default() -> Terms {
        Terms::new()
    }
}

impl std::ops::Deref for Terms {
    type Target = [Term];
    fn deref(&self) -> &[Term] {
        &self.terms[..usize::from(self.len)]
    }
}

#[derive(Debug, Clone, Copy)]
pub struct ConvFrame {
    pub terms: Terms,
    /// Which of the layout's bias vectors.
    pub bias: u8,
    /// A frame of the output's shape to add.
    pub residual: Option<Frame>,
    pub out: Frame,
}

#[derive(Debug, Clone, Copy)]
pub struct ConvOp<'a> {
    pub layout: &'a ConvLayout,
    /// Shape of the input frames. A shortcut's input has the shape of the output but for its channels.
    pub input: FrameShape,
    pub frames: &'a [ConvFrame],
    /// Whether to store each output frame's norm statistics with it.
    pub statistics: bool,
    /// Offset of at least [`super::Backend::conv_scratch`] bytes.
    pub scratch: u64,
    /// None but for layouts with [`super::Backend::sums_bytes`].
    pub sums: Sums<Frame>,
}

/// One input frame of a [`CarryOp`], and the output frame of the same number.
#[derive(Debug, Clone, Copy)]
pub struct CarryFrame {
    pub input: Frame,
    /// For the output frame of the same number, and for the next two.
    pub slabs: [u8; 3],
    pub bias: u8,
    pub out: Frame,
}

/// A convolution over three frames whose past is not its input: it carries on what its frames add to the next two outputs, which
/// is far less where these have few channels.
#[derive(Debug, Clone, Copy)]
pub struct CarryOp<'a> {
    pub layout: &'a ConvLayout,
    pub input: FrameShape,
    /// One after the other in the clip.
    pub frames: &'a [CarryFrame],
    /// What the frames before these carried on; nothing at the beginning of a clip.
    pub before: Option<Frame>,
    /// Where it goes with these, if there are later ones. May be the same place.
    pub after: Option<Frame>,
}

/// Where a frame in host memory lies: an offset in bytes into the pinned host memory of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostFrame(pub u64);

/// Where bytes that are remembered lie: on the device, or with the past in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    Device(Frame),
    Host(HostFrame),
}

impl Kept {
    pub fn device(offset: u64) -> Kept {
        Kept::Device(Frame(offset))
    }

    pub fn host(offset: u64) -> Kept {
        Kept::Host(HostFrame(offset))
    }

    /// So many bytes further on.
    pub fn plus(self, bytes: u64) -> Kept {
        match self {
            Kept::Device(Frame(offset)) => Kept::device(offset + bytes),
            Kept::Host(HostFrame(offset)) => Kept::host(offset + bytes),
        }
    }
}

/// A frame on the device; or elsewhere, with its statistics on the device.
pub type FrameAt = At<Frame, HostFrame>;

/// A frame of the past.
pub type PastFrame = PastAt<Frame, HostFrame>;

/// One output frame of a [`BandedOp`].
#[derive(Debug, Clone)]
pub struct BandedFrame {
    /// (input, slab) in the order of the sum. Inputs are counted, past ones first.
    pub terms: Vec<(usize, u8)>,
    /// The last summand.
    pub shortcut: Option<(FrameAt, u8)>,
    pub bias: u8,
    pub residual: Option<Frame>,
    /// What is to be made anew later is made for its statistics alone.
    pub out: FrameAt,
}

/// Frames that an operation has made for it, by a convolution without a norm.
#[derive(Debug)]
pub struct AnewOp<'a, C> {
    pub weights: &'a C,
    pub layout: &'a ConvLayout,
    pub input: FrameShape,
    /// The terms and the bias of each.
    pub frames: &'a [(Terms, u8)],
}

impl<C> Clone for AnewOp<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for AnewOp<'_, C> {}

/// A convolution in bands of rows. Fresh frames are normalised on their way into a band, from host memory or made anew too; of the
/// past, some columns are on the device, and the others come from host memory; some frames are kept for the future. Nothing lies
/// whole on the device but what the host of the operation put there. Without a norm, fresh frames are read where they lie, on the
/// device.
#[derive(Debug)]
pub struct BandedOp<'a, C> {
    pub weights: &'a C,
    pub layout: &'a ConvLayout,
    pub input: FrameShape,
    /// Normalised, without statistics.
    pub past: &'a [PastFrame],
    pub fresh: &'a [FrameAt],
    /// Which fresh frames to keep, and where: in a place of `past` only if that is on the device.
    pub keep: &'a [(usize, PastFrame)],
    /// Which columns of past and kept frames are on the device, and which in host memory; both as frames of their own.
    pub columns: Columns,
    /// Which fresh frames that are on the device will be made anew, and where their statistics are to be kept.
    pub keep_statistics: &'a [(usize, Frame)],
    pub frames: &'a [BandedFrame],
    /// What makes the frames that are made anew.
    pub anew: Option<AnewOp<'a, C>>,
    pub statistics: bool,
    /// Offset of at least [`super::Backend::conv_scratch`] bytes.
    pub scratch: u64,
    /// Offset and bytes of the bands under way: at least [`super::Backend::band_bytes`], and the same for all operations of
    /// a job, as those of one are under way while the next begins.
    pub bands: (u64, u64),
}

impl<C> BandedOp<'_, C> {
    /// What [`super::Backend::band_bytes`] is asked for.
    pub fn frames_in_band(&self) -> BandFrames {
        let frames = self.frames.iter().map(|frame| (frame.shortcut.map(|(at, _)| at), frame.out));
        let past = self.past.iter().filter(|past| past.far.is_some()).count();
        BandFrames::new(self.layout, (past, self.columns), self.fresh, frames)
    }
}

/// Norm, and SiLU if the layout has it, of frames as they go into a convolution. The statistics are those stored with the
/// input.
#[derive(Debug, Clone, Copy)]
pub struct NormOp<'a> {
    pub layout: &'a ConvLayout,
    pub shape: FrameShape,
    /// (input, output) of each frame, which may be the same.
    pub frames: &'a [(Frame, Frame)],
}

/// `out = softmax(q k^T) v` over the pixels of each frame. The input has q, k and v side by side in 3 x `channels`
/// channels; the usual scale is already in q.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOp<'a> {
    /// Shape of an output frame.
    pub shape: FrameShape,
    /// (input, output) of each frame.
    pub frames: &'a [(Frame, Frame)],
    pub scratch: u64,
}

/// `value * mul + add`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Affine {
    pub mul: f32,
    pub add: f32,
}

/// Frame `frame` of clip `batch` of a host tensor, from (`top`, `left`) on, becomes a frame of activations. Rows and
/// columns beyond the host's image repeat its last ones.
#[derive(Debug, Clone, Copy)]
pub struct LoadOp<'a> {
    pub from: &'a View,
    pub batch: u64,
    pub frame: u64,
    pub top: u64,
    pub left: u64,
    pub map: Affine,
    pub shape: FrameShape,
    pub into: Frame,
    /// Offset of at least [`super::Backend::staging_bytes`] of `shape`, the same for all loads of a job and used by
    /// nothing else: frames are under way while other operations run.
    pub staging: u64,
}

/// The fades of a tile, one weight for each of its rows and columns.
#[derive(Debug, Clone, Copy)]
pub struct Blend<'a> {
    pub rows: &'a [f32],
    pub columns: &'a [f32],
}

/// `into[top + y, left + x] += from[y, x] * rows[y] * columns[x]`; the first tile of a frame clears it before.
#[derive(Debug, Clone, Copy)]
pub struct BlendOp<'a> {
    pub from: Frame,
    pub from_shape: FrameShape,
    pub into: Frame,
    pub into_shape: FrameShape,
    pub top: u64,
    pub left: u64,
    pub fade: Blend<'a>,
    pub clear: bool,
    /// Offset of at least [`super::Backend::fade_bytes`] of `into_shape`.
    pub scratch: u64,
}

/// A sample of the latent's distribution instead of its mean. The noise of an element depends on the seed and on the
/// element's place in the clip alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posterior {
    pub seed: u64,
    /// The channel of the log-variance that belongs to channel 0.
    pub logvar_channel: u64,
}

/// Channels of a frame of activations, from `channel` on, become frame `frame` of clip `batch` of a host tensor; as
/// many as the tensor has. Rows and columns beyond the host's image are dropped.
#[derive(Debug, Clone, Copy)]
pub struct StoreOp<'a> {
    pub from: Frame,
    pub shape: FrameShape,
    pub channel: u64,
    /// Sums of the fades of all tiles: each element is divided by `rows[y] * columns[x]` (at least 1e-6).
    pub divide: Option<Blend<'a>>,
    /// Applied before `map`.
    pub clamp: Option<(f32, f32)>,
    pub sample: Option<Posterior>,
    /// Applied last. Integer types are then rounded to nearest and clamped to their range.
    pub map: Affine,
    pub into: &'a View,
    pub batch: u64,
    pub frame: u64,
    /// The frame's index in the whole clip, for the noise; differs from `frame` when a stream is pulled in pieces.
    pub clip_frame: u64,
    /// Offset of at least [`super::Backend::fade_bytes`] of `shape`, if there is anything to divide by.
    pub scratch: u64,
    /// Offset of at least [`super::Backend::staging_bytes`] of the frame in `into`, kept for stores as in [`LoadOp`]
    /// for loads.
    pub staging: u64,
}
