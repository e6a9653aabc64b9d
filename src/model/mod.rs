//! The model: configuration, checkpoint, layers, and the algebra done once at load time.
//! Knows tensor shapes and files. Must not know devices, plans or clips.

pub mod causal;
pub mod checkpoint;
pub mod cone;
pub mod config;
pub mod fold;
pub mod graph;
pub mod network;

pub use causal::{Recipe, Time, pair_of};
pub use checkpoint::Checkpoint;
pub use cone::{Cone, FrameRange};
pub use config::Config;
pub use network::{Block, Direction, Layer, Network, Stage};
