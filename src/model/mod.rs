//! The model: its configuration, its checkpoint, its layers, and the algebra done once at load time.

pub mod causal;
pub mod checkpoint;
pub mod config;
pub mod fold;
mod names;
pub mod network;

pub use causal::{Recipe, Time};
pub use checkpoint::Checkpoint;
pub use config::Config;
pub use network::{Block, Direction, Layer, LayerId, Network, Stage};
