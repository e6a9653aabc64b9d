//! The arithmetic. A backend knows frames, convolutions and attention; it knows no model, no plan and no clip.
//!
//! Activations live in one block of memory that the backend allocates and the caller divides: a [`Frame`] is an offset
//! into it. Every result depends on the frames that went in and on nothing else; not on how many frames share a
//! call, not on the number of threads. That is what makes results identical however a clip is cut.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod device_memory;
mod ops;
mod precision;

pub use crate::tensor::{ConvLayout, ConvSource, HostMemory, Prologue, Sums, Window};
pub use device::{DeviceInfo, devices, host_memory};
pub use device_memory::{DeviceAllocFn, DeviceAllocator, DeviceCallbacks, DeviceFreeFn};
pub use ops::{
    Affine, AnewOp, AttentionOp, BandedFrame, BandedOp, Blend, BlendOp, CarryFrame, CarryOp, ConvFrame, ConvOp, Frame,
    FrameAt, HostFrame, HostStream, Kept, LoadOp, NormOp, PastFrame, Posterior, StoreOp, Term, Terms,
};
pub use precision::Precision;

use crate::error::{Error, Result};
use crate::tensor::{BandFrames, FrameShape, Rates};

/// Asked now and then on the calling thread while an operation runs; `true` ends it with [`crate::error::Error::Cancelled`].
/// An operation that was ended may be run again; those that read what they write are never ended.
pub type Stop<'a> = dyn FnMut() -> bool + 'a;

/// One device. A method may return before its result is there, or before the device was even told; the next method waits for
/// it by itself, and [`Backend::finish`] for all of them. Memory and weights have to live until then.
pub trait Backend: Send + Sync + 'static {
    /// Whether the device's memory is the host's.
    const HOST_MEMORY: bool;
    /// One block of device memory, given back when dropped.
    type Memory: Send;
    /// Room for the weights of a network.
    type Store: Send + Sync;
    /// The weights of one convolution, in the form the kernels read. Shared between handles.
    type Conv: Send + Sync;

    /// What it computes in.
    fn precision(&self) -> Precision;
    /// Whether there are kernels for convolutions of these layouts and for attention over these numbers of channels; if
    /// not, the error says which is missing and what to use instead. Asked once, before anything is loaded.
    fn check_layers(&self, _layouts: &[ConvLayout], _attention: &[u64]) -> Result<()> {
        Ok(())
    }

    /// Pixels of a frame, or of several, that keep the device busy.
    fn busy_pixels(&self) -> u64;
    /// Bytes that a frame of activations and its norm statistics take, rounded so that frames can lie side by side.
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64;
    /// Bytes of scratch that [`Backend::conv`] needs for `frames` frames of `input`.
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64;
    /// Bytes of scratch that [`Backend::attention`] needs. `shape` is that of its result.
    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64;
    /// Bytes that the prepared weights take, rounded so that those of several convolutions can lie side by side.
    fn weight_bytes(&self, layout: &ConvLayout) -> u64;
    /// Bytes that the device gives for a block of `bytes`: never fewer.
    fn block_bytes(&self, bytes: u64) -> u64;

    /// Bytes that the device has free, as far as it can tell.
    fn free_bytes(&self) -> u64;
    /// Bytes of a place that a frame of a host tensor passes through on its way, on the device and in pinned host
    /// memory. `shape` is that of the activations. 0 where the device reads host tensors itself.
    fn staging_bytes(&self, shape: FrameShape) -> u64;
    /// Bytes of scratch for the fades that [`Backend::blend`] and [`Backend::store`] take. `shape` is that of the frame
    /// that tiles are blended into.
    fn fade_bytes(&self, _: FrameShape) -> u64 {
        0
    }

    /// How fast it is, roughly.
    fn rates(&self) -> Rates;
    /// Bytes that the bands of [`Backend::banded`] that are under way take on the device: the more output frames, the fewer rows. It
    /// will do for fewer frames in bands of as many rows. `None` where it cannot do that; the
    /// memory of some devices is the host's, so that there is nothing to move.
    fn band_bytes(&self, layout: &ConvLayout, input: FrameShape, frames: BandFrames) -> Option<u64>;
    /// Bytes that have to lie before the bands in a block, where frames of this shape are made anew, a part at a time.
    fn bytes_above_parts(&self, _: FrameShape) -> u64 {
        0
    }

    /// Bytes of the [`Sums`] of a frame, for layouts of which [`Backend::conv`] takes some along and leaves some.
    fn sums_bytes(&self, _: &ConvLayout, _: FrameShape) -> Option<u64> {
        None
    }

    /// Bytes of what [`Backend::conv_carrying`] carries on, for layouts that take it; all others take [`Backend::conv`].
    fn carry_bytes(&self, _: &ConvLayout, _: FrameShape) -> Option<u64> {
        None
    }

    /// Bytes of its own memory that the device takes to reach so much pinned host memory.
    fn mapping_bytes(&self, _: u64) -> u64 {
        0
    }
    /// `bytes` of device memory, and pinned host memory beside it.
    fn allocate(&self, bytes: u64, host: HostMemory) -> Result<Self::Memory>;
    /// Whether some of the host memory could not be pinned, so that moving it takes longer than planned.
    fn is_pageable(&self, _: &Self::Memory) -> bool {
        false
    }
    /// What comes now waits for what is in the host's stream; the calling thread then waits for nothing until
    /// [`Backend::finish`].
    fn begin(&self, memory: &mut Self::Memory, host: Option<HostStream>) -> Result<()>;
    /// With a host's stream, lets it wait for everything that was asked for. Without one, waits, and every host tensor is
    /// written.
    fn finish(&self, memory: &mut Self::Memory, host: Option<HostStream>) -> Result<()>;
    /// Room for `bytes` of weights, which are [`Backend::weight_bytes`] added up. Where the device's memory is the host's
    /// there is nothing to take ahead: each convolution takes its own.
    fn allocate_weights(&self, bytes: u64) -> Result<Self::Store>;
    /// The same in host memory, from where [`Backend::fetch_weights`] brings them.
    fn allocate_host_weights(&self, _: u64) -> Result<Self::Store> {
        Err(Error::Internal("this device's memory is the host's".into()))
    }
    /// Whether weights wait in memory that could not be pinned.
    fn is_pageable_store(&self, _: &Self::Store) -> bool {
        false
    }
    /// Brings the weights of a convolution into the kernels' form, `offset` bytes into `store`. Asks the source for one
    /// slab at a time.
    fn prepare(
        &self,
        store: &Self::Store,
        offset: u64,
        layout: &ConvLayout,
        source: &mut dyn ConvSource,
    ) -> Result<Self::Conv>;

    /// Brings weights from host memory to a place in a job's block, as soon as nothing that was asked for before needs that. Of the
    /// slabs, no more than the first; these take as much room as if there were no others.
    fn fetch_weights(&self, _: &mut Self::Memory, _: &Self::Conv, _slabs: u64, _into: Frame) -> Result<()> {
        Err(Error::Internal("this device's memory is the host's".into()))
    }
    /// The weights that were brought there. What is asked for next waits for them.
    fn fetched_weights(&self, _: &mut Self::Memory, _: &Self::Conv, _slabs: u64, _at: Frame) -> Result<Self::Conv> {
        Err(Error::Internal("this device's memory is the host's".into()))
    }

    /// Whether [`Backend::conv`] does this layout's prologue itself. If not, [`Backend::normalise`] has to come first.
    fn fuses_norm(&self, layout: &ConvLayout) -> bool;

    /// Whether [`Backend::conv`] may write an output over the frame that is added to it. It is then never interrupted.
    fn adds_in_place(&self) -> bool;

    /// Host tensor to activations.
    fn load(&self, memory: &mut Self::Memory, op: &LoadOp, stop: &mut Stop) -> Result<()>;
    /// The prologue of a convolution on its own, for layouts that are not fused. Never interrupted, so that a frame may be
    /// normalised in place.
    fn normalise(&self, memory: &mut Self::Memory, weights: &Self::Conv, op: &NormOp, stop: &mut Stop) -> Result<()>;
    /// Convolution with everything around it: norm and SiLU on the way in, bias, residual and statistics on the way out.
    fn conv(&self, memory: &mut Self::Memory, weights: &Self::Conv, op: &ConvOp, stop: &mut Stop) -> Result<()>;
    /// A convolution that carries on sums instead of remembering its input, where [`Backend::carry_bytes`] says so; with norm
    /// and SiLU on the way in. Never interrupted, as it may write over what it reads.
    fn conv_carrying(&self, _: &mut Self::Memory, _: &Self::Conv, _: &CarryOp, _: &mut Stop) -> Result<()> {
        Err(Error::Internal("this device carries no sums".into()))
    }
    /// A convolution in bands of rows, where [`Backend::band_bytes`] says so. An output may lie over the fresh frame of the
    /// same place in the clip, so it is never interrupted.
    fn banded(&self, memory: &mut Self::Memory, op: &BandedOp<Self::Conv>, stop: &mut Stop) -> Result<()>;
    /// One head over all pixels of a frame, with a running softmax: the score matrix never exists.
    fn attention(&self, memory: &mut Self::Memory, op: &AttentionOp, stop: &mut Stop) -> Result<()>;
    /// Adds a tile, weighted by its fades, to the frame it is a part of. Never interrupted, as it cannot be run again.
    fn blend(&self, memory: &mut Self::Memory, op: &BlendOp, stop: &mut Stop) -> Result<()>;
    /// Activations to host tensor.
    fn store(&self, memory: &mut Self::Memory, op: &StoreOp, stop: &mut Stop) -> Result<()>;

    /// Bytes of a frame, or of a part of one, as they are; waits for whatever makes them. Where a part begins is a
    /// multiple of 64 bytes from where its frame does.
    fn read(&self, memory: &mut Self::Memory, from: Kept, into: &mut [u8]) -> Result<()>;
    /// Puts back what [`Backend::read`] gave, once nothing that is under way needs what was there.
    fn write(&self, memory: &mut Self::Memory, to: Kept, from: &[u8]) -> Result<()>;
}
