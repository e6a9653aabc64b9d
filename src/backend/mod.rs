//! The arithmetic. A backend knows frames, convolutions and attention; it knows no model, no plan and no clip.
//!
//! Activations live in one block of memory that the backend allocates and the caller divides: a [`Frame`] is an offset
//! into it. Every result depends on the frames that went in and on nothing else; not on how many frames share a
//! call, not on the number of threads. That is what makes results identical however a clip is cut.

pub mod cpu;
mod device;
mod ops;

pub use crate::tensor::{ConvLayout, ConvSource, Prologue, Window};
pub use device::{DeviceInfo, devices};
pub use ops::{Affine, AttentionOp, Blend, BlendOp, ConvFrame, ConvOp, Frame, LoadOp, Posterior, StoreOp, Term, Terms};

use crate::error::Result;
use crate::tensor::FrameShape;

/// Asked now and then on the calling thread while an operation runs; `true` ends it with [`crate::error::Error::Cancelled`].
/// An operation that was ended may be run again: it reads nothing that it writes.
pub type Stop<'a> = dyn FnMut() -> bool + 'a;

/// One device. Every method that computes returns when the result can be used by the next method.
pub trait Backend: Send + Sync + 'static {
    /// One block of device memory, given back when dropped.
    type Memory: Send;
    /// The weights of one convolution, in the form the kernels read. Shared between handles.
    type Conv: Send + Sync;

    /// Bytes that a frame of activations and its norm statistics take, rounded so that frames can lie side by side.
    fn frame_bytes(&self, shape: FrameShape, groups: u64) -> u64;
    /// Bytes of scratch that [`Backend::conv`] needs for `frames` frames of `input`.
    fn conv_scratch(&self, layout: &ConvLayout, input: FrameShape, frames: u64) -> u64;
    /// Bytes of scratch that [`Backend::attention`] needs. `shape` is that of its result.
    fn attention_scratch(&self, shape: FrameShape, frames: u64) -> u64;
    /// Bytes that the prepared weights take.
    fn weight_bytes(&self, layout: &ConvLayout) -> u64;

    /// Bytes that the device has free, as far as it can tell.
    fn free_bytes(&self) -> u64;
    fn allocate(&self, bytes: u64) -> Result<Self::Memory>;
    /// Brings the weights of a convolution into the kernels' form. Asks the source for one slab at a time.
    fn prepare(&self, layout: &ConvLayout, source: &mut dyn ConvSource) -> Result<Self::Conv>;

    /// Host tensor to activations.
    fn load(&self, memory: &mut Self::Memory, op: &LoadOp, stop: &mut Stop) -> Result<()>;
    /// Convolution with everything around it: norm and SiLU on the way in, bias, residual and statistics on the way out.
    fn conv(&self, memory: &mut Self::Memory, weights: &Self::Conv, op: &ConvOp, stop: &mut Stop) -> Result<()>;
    /// One head over all pixels of a frame, with a running softmax: the score matrix never exists.
    fn attention(&self, memory: &mut Self::Memory, op: &AttentionOp, stop: &mut Stop) -> Result<()>;
    /// Adds a tile, weighted by its fades, to the frame it is a part of.
    fn blend(&self, memory: &mut Self::Memory, op: &BlendOp, stop: &mut Stop) -> Result<()>;
    /// Activations to host tensor.
    fn store(&self, memory: &mut Self::Memory, op: &StoreOp, stop: &mut Stop) -> Result<()>;
}
