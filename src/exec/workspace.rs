//! The memory that a call or a stream works in. Knows the plan and the backend; below sessions and streams, which both
//! own one.

use std::sync::Arc;

use super::ledger::{Held, Ledger};
use crate::backend::{Backend, HostMemory, HostStream};
use crate::error::Result;
use crate::model::Direction;
use crate::plan::Blueprint;
use crate::tensor::{Place, View};

/// One block of device memory and pinned host memory beside it. Reused by the next call if it fits.
pub struct Workspace<B: Backend> {
    pub memory: B::Memory,
    pub bytes: u64,
    /// The bytes, and what the device takes beside them to reach host memory.
    pub held: Held,
    pub host: HostMemory,
    _pinned: Held,
}

impl<B: Backend> Workspace<B> {
    pub fn allocate(backend: &B, ledger: &Arc<Ledger>, blueprint: &Blueprint) -> Result<Workspace<B>> {
        let (bytes, host) = (blueprint.workspace_bytes(), blueprint.pinned());
        let memory = backend.allocate(bytes, host)?;
        let held = ledger.hold(bytes + blueprint.mapping_bytes());
        Ok(Workspace { memory, bytes, held, host, _pinned: ledger.hold_pinned(host.bytes()) })
    }

    /// Whether it is exactly what a plan asks for.
    pub fn fits(&self, blueprint: &Blueprint) -> bool {
        (self.bytes, self.host) == (blueprint.workspace_bytes(), blueprint.pinned())
    }
}

/// The host's stream, if the call may return before its work is done: only where all tensors are on the device.
pub fn stream_for<const N: usize>(
    stream: Option<HostStream>,
    place: Place,
    tensors: [Option<&View>; N],
) -> Option<HostStream> {
    let on_device = |view: &View| view.place() == place && place != Place::Cpu;
    stream.filter(|_| tensors.into_iter().flatten().all(on_device))
}

pub fn stage_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Encode => "encode",
        Direction::Decode => "decode",
    }
}
