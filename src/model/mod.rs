//! The model: families and their graphs, the compiler to layers, checkpoints, and the algebra done once at load time.
//! Knows tensor shapes and files. Must not know devices, plans or clips.

pub mod checkpoint;
pub mod cone;
pub mod families;
pub mod fold;
pub mod geometry;
pub mod graph;
pub mod lower;
pub mod network;

pub use checkpoint::Checkpoint;
pub use cone::{Cone, FrameRange};
pub use families::Model;
pub use geometry::{Direction, Geometry};
pub use lower::{Recipe, RecipeTerm, Recipes, pair_of};
pub use network::{ChunkPairs, Layer, LevelMap, LevelShortcut, Network, Reader, Role, Source, Stage, attention_work};
