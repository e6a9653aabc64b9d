//! The repository itself: what its documents say, its scripts, its features and the structure of its sources.

#[path = "../common/mod.rs"]
mod common;

mod cargo_features;
mod packaging;
mod readme;
mod readme_commands;
mod structure;
