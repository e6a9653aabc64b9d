//! Data in host memory and its way to the device and back: cached frames in bands, host tensors through staging
//! buffers, weights. Copies run on streams of their own, ordered against the compute streams by events.

pub mod bands;
pub mod copies;
pub mod division;
pub mod pack;
pub mod staging;
pub mod weights;
