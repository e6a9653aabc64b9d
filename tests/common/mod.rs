//! A host for tests: loads the built library and looks up its functions by name, as any host does.

#![allow(dead_code, unused_imports, unused_macros, reason = "each test uses some of it")]

mod api;
mod buffer;
pub mod command;
mod devices;
mod failure;
mod files;
pub mod hub;
pub mod oracle;
pub mod planner;
pub mod process;
pub mod progress;
mod random;
pub mod random_graph;
pub mod safetensors;
mod stream;
mod structs;
mod tiny;
pub mod tools;
pub mod trace;
mod vae;
pub mod weights;

pub use api::{Api, api, create_info, library_path, run_info, sized, use_linked_library};
pub use buffer::Buffer;
pub use devices::{devices, on_every_device};
pub use failure::{Failure, error_text, outcome};
pub use files::{demo, golden, root, small, video_models};
pub use random::Random;
pub use stream::Stream;
pub(crate) use structs::with_structs;
pub use tiny::{LATENT_CHANNELS, tiny, tiny_bytes};
pub use vae::Vae;
