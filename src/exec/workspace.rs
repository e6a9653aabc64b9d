//! The memory of a call or a stream. Knows the plan and the backend; must not know sessions and streams, which own it.

use std::sync::Arc;

use super::ledger::{Held, Ledger};
use super::settings::{OnNonFinite, Settings};
use super::trace;
use crate::backend::{Backend, HostStream, NonFinite};
use crate::error::Result;
use crate::ir::{PinnedBytes, TensorDevice, View};
use crate::plan::Plan;

/// One block of device memory and pinned host memory beside it. Reused by the next call if it fits.
pub struct Workspace<B: Backend> {
    pub memory: B::Memory,
    pub bytes: u64,
    /// The bytes, and what the device takes beside them to reach host memory.
    pub held: Held,
    pub host: PinnedBytes,
    _pinned: Held,
}

impl<B: Backend> Workspace<B> {
    pub fn allocate(backend: &B, ledger: &Arc<Ledger>, plan: &Plan) -> Result<Workspace<B>> {
        let (bytes, host) = (plan.workspace_bytes(), plan.pinned());
        let memory = backend.allocate(bytes, host)?;
        let held = ledger.hold(bytes + plan.mapping_bytes());
        Ok(Workspace { memory, bytes, held, host, _pinned: ledger.hold_pinned(host.total()) })
    }

    /// Ends a call. On a host's stream it waits for the result only if non-finite values are errors.
    pub fn finish(
        &mut self,
        backend: &B,
        stream: Option<HostStream>,
        settings: &Settings,
        place: TensorDevice,
    ) -> Result<NonFinite> {
        backend.finish(&mut self.memory, stream)?;
        let seen = match stream {
            Some(_) if settings.on_nonfinite == OnNonFinite::Propagate => NonFinite::default(),
            _ => {
                stream.map_or(Ok(()), |_| backend.finish(&mut self.memory, None))?;
                backend.take_nonfinite(&mut self.memory)
            }
        };
        self.collect_trace(backend, settings, place)?;
        Ok(seen)
    }

    /// Writes the trace of a call that has ended, if there is one.
    pub fn collect_trace(&mut self, backend: &B, settings: &Settings, place: TensorDevice) -> Result<()> {
        trace::collect(settings.trace.as_ref(), backend, &mut self.memory, place, true)
    }

    /// Whether it is exactly what a plan asks for.
    pub fn fits(&self, plan: &Plan) -> bool {
        (self.bytes, self.host) == (plan.workspace_bytes(), plan.pinned())
    }
}

/// The host's stream, if the call may return before its work is done: only where all tensors are on the device.
pub fn stream_for<const N: usize>(
    stream: Option<HostStream>,
    place: TensorDevice,
    tensors: [Option<&View>; N],
) -> Option<HostStream> {
    let on_device = |view: &View| view.device() == place && place != TensorDevice::Cpu;
    stream.filter(|_| tensors.into_iter().flatten().all(on_device))
}
