//! What scheduling writes to: a queue of operations, and the memory of their frames.

use std::collections::VecDeque;

use crate::ir::Op;
use crate::plan::arena::{Arenas, Slots};

#[derive(Debug, Clone)]
pub struct Sink {
    pub arenas: Arenas,
    pub ops: VecDeque<Op<Slots>>,
}
