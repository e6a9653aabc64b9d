//! The memory of a call or a stream. Knows the plan and the backend; must not know who runs what in it.

use std::sync::Arc;

use super::ledger::{Held, Ledger};
use crate::backend::Backend;
use crate::error::Result;
use crate::ir::PinnedBytes;
use crate::plan::Plan;

/// One block of device memory and pinned host memory beside it. Reused by the next call if it fits.
pub struct Workspace<B: Backend> {
    pub memory: B::Memory,
    pub bytes: u64,
    pub host: PinnedBytes,
    /// Of the device the bytes, and what it takes beside them to reach host memory.
    pub held: Held,
}

impl<B: Backend> Workspace<B> {
    pub fn allocate(backend: &B, ledger: &Arc<Ledger>, plan: &Plan) -> Result<Workspace<B>> {
        let (bytes, host) = (plan.workspace, plan.pinned());
        let memory = backend.allocate(bytes, host)?;
        let held = ledger.hold(bytes + plan.mapping, host.total());
        Ok(Workspace { memory, bytes, host, held })
    }

    /// Whether it is exactly what a plan asks for.
    pub fn fits(&self, plan: &Plan) -> bool {
        (self.bytes, self.host) == (plan.workspace, plan.pinned())
    }
}
