//! What scheduling writes to: a queue of operations, and the memory of their frames.

use std::collections::VecDeque;

use crate::ir::Op;
use crate::plan::arena::{Arenas, Slots};

/// Where operations are put, and the memory of their frames.
pub struct Sink<'a> {
    pub arenas: &'a mut Arenas,
    pub ops: &'a mut VecDeque<Op<Slots>>,
}
