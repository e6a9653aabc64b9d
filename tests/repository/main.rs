//! The repository itself: what its documents say, its scripts and its features.

#[path = "../common/mod.rs"]
mod common;

mod cargo_features;
mod packaging;
mod readme;
mod readme_commands;
