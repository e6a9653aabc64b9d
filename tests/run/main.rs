//! Runs through the C ABI: cancel, values that are not finite, ranges, tiles, traces.

#[path = "../common/mod.rs"]
mod common;

mod cancel;
mod nonfinite;
mod ranges;
mod tiles;
mod trace;
