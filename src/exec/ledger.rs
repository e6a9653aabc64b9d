//! Who holds how much: the figures of `vvae_memory`, kept where they can be read during a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::MemoryUse;

/// Bytes of device memory held by one session and its streams.
#[derive(Debug, Default)]
pub struct Ledger {
    now: AtomicU64,
    peak: AtomicU64,
    idle: AtomicU64,
    /// Pinned host memory beside it; `None` where the device's memory is the host's.
    pinned: Option<Arc<Ledger>>,
}

/// Bytes that are held until this is dropped.
#[derive(Debug)]
pub struct Held {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Ledger {
    pub fn new(host_memory: bool) -> Ledger {
        Ledger { pinned: (!host_memory).then(Arc::default), ..Ledger::default() }
    }

    /// Counts pinned host memory.
    pub fn hold_pinned(self: &Arc<Ledger>, bytes: u64) -> Held {
        self.pinned.as_ref().unwrap_or(self).hold(bytes)
    }

    pub fn hold(self: &Arc<Ledger>, bytes: u64) -> Held {
        self.add(bytes);
        Held { ledger: Arc::clone(self), bytes }
    }

    fn add(&self, bytes: u64) {
        let now = self.now.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(now, Relaxed);
    }

    /// Says how much of what is held only waits for the next call.
    pub fn set_idle(&self, bytes: u64) {
        self.idle.store(bytes, Relaxed);
    }

    /// What could be given back if the next plan asked for it.
    pub fn idle(&self) -> u64 {
        self.idle.load(Relaxed)
    }

    pub fn figures(&self) -> MemoryUse {
        let (now, peak) = (self.now.load(Relaxed), self.peak.load(Relaxed));
        let host = self.pinned.as_ref().map_or(now, |pinned| pinned.now.load(Relaxed));
        MemoryUse { now, peak, reserved: self.idle(), host }
    }
}

impl Held {
    pub fn grow(&mut self, bytes: u64) {
        self.ledger.add(bytes);
        self.bytes += bytes;
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.now.fetch_sub(self.bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_outlives_what_was_held() {
        let ledger = Arc::new(Ledger::default());
        let a = ledger.hold(100);
        drop(ledger.hold(50));
        drop(a);
        assert_eq!((ledger.figures().now, ledger.figures().peak), (0, 150));
    }

    #[test]
    fn growing_keeps_no_ledger_alive() {
        let ledger = Arc::new(Ledger::default());
        let mut held = ledger.hold(100);
        held.grow(50);
        assert_eq!((ledger.figures().now, held.bytes(), Arc::strong_count(&ledger)), (150, 150, 2));
        drop(held);
        assert_eq!((ledger.figures().now, ledger.figures().peak, Arc::strong_count(&ledger)), (0, 150, 1));
    }
}
