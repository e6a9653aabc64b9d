//! The `vvae` command, run as a program.

#[path = "../common/mod.rs"]
mod common;

mod compare;
mod faults;
mod files;
mod formats;
mod get;
mod json;
mod pipes;
mod report;
mod video;
mod vvae;
