//! The words that the planner, the runner and the backends share: shapes, tensors, layouts, operations, device
//! profiles.
//!
//! Owns plain data only. Knows no model, no plan and no device.

mod conv;
mod dtype;
mod host_memory;
mod level;
mod location;
mod op;
mod overlap;
mod profile;
mod rows;
mod shape;
mod tensor_op;
mod view;

pub use conv::{ConvLayout, ConvSource, EachSlab, LayerId, Norm, PairSlabs, Prologue, WeightBlock, WeightPart, Window};
pub use dtype::{DType, TensorKind};
pub use host_memory::{BandBuffers, Buffers, PinnedBytes};
pub use level::{AddOp, AddedFrame, PoolOp, PooledFrame, Repeat};
pub use location::{CacheFormat, CachedFrame, DeviceOffset, FrameRef, HostOffset, Location, Offsets, SplitColumns};
pub use op::{
    Access, AttentionOp, BandInput, BandPart, BandShape, BandSource, BandTerm, BandedConvOp, BandedFrame, BlendOp,
    ConvFrame, ConvOp, FetchOp, FetchedWeights, FrameUnit, LoadOp, NormaliseOp, Op, PartialSums, PartialSumsOut, Place,
    Relocate, Rematerialise, RematerialisedFrame, Shortcut, StoreOp, Term, Value,
};
pub use overlap::share_bytes;
pub use profile::{ConvProducts, DeviceProfile, GivenRates, PairCosts, PairedLayers, PartialSumsSize, Rates, Sizes};
pub use rows::{Rows, each_rows};
pub use shape::{AXES, FrameShape, Shape};
pub use tensor_op::{Affine, BlendTile, ChannelMaps, Fades, LoadTensor, Posterior, StoreTensor, patch_pixel};
pub use view::{TensorDevice, View};
