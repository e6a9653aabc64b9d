//! What every GPU does alike: bands and their division, staging, frames and weights in host memory, and the order of
//! copies and launches. Names no API; `api` says what one has to give. Knows no model, no plan and no clip.

mod api;
mod bands;
mod block;
mod copies;
mod division;
mod job;
mod limit;
mod rows;
mod staging;
mod weights;

pub use api::{
    ConvBand, ConvLaunch, CopyDirection, Event, GpuApi, GpuConv, GpuMemory, HostBlock, HostCopy, LaunchConv,
    LaunchCopies, LaunchLevels, LaunchNorm, LaunchPixels, NextNorm, NonFiniteFlag, NonFiniteFlags, NormInPlace, NormOf,
    NormRows, Queue, RowCopy, RowPitches, Spans, SplitFrames, Strided, TensorFrame, TensorPlace, U8Copy, U8Rows,
    conv_whole,
};
pub use block::{AddressedBlock, check_region};
pub use job::{GpuBackend, JobMemory};
#[cfg(test)]
pub use limit::testing as limit_testing;
pub use limit::{LaunchLimit, attention_products, conv_products};
pub use rows::{MOMENTS_BYTES, RowSizes, output_rows, tile_grid};
pub use weights::{PaddedWeights, StoredConv, WeightAddresses, WeightLayout, WeightStore, write_pieces};

#[cfg(test)]
pub mod tests;
