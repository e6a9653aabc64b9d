//! What lies in host memory and moves to the device when it is needed.

pub mod bands;
pub mod compact;
pub mod copies;
pub mod division;
pub mod pack;
pub mod staging;
pub mod weights;
