//! Who holds how much: the figures of `vvae_memory`, kept where they can be read during a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::MemoryUse;
use super::settings::{HOST_MARGIN, Limit};

/// Bytes of device memory held by one session and its streams.
#[derive(Debug, Default)]
pub struct Ledger {
    now: AtomicU64,
    peak: AtomicU64,
    idle: AtomicU64,
    /// Whether the device's memory is the host's.
    is_host: bool,
    /// Pinned host memory beside it, if it is not.
    pinned: AtomicU64,
    /// Of the devices that this one sums up.
    members: Vec<Arc<Ledger>>,
}

/// Bytes that are held until this is dropped.
#[derive(Debug)]
pub struct Held {
    ledger: Arc<Ledger>,
    pub device: u64,
    /// Pinned host memory.
    pub host: u64,
}

impl Ledger {
    pub fn new(is_host: bool) -> Ledger {
        Ledger { is_host, ..Ledger::default() }
    }

    /// What these hold, and what is held of it itself.
    pub fn sum(members: Vec<Arc<Ledger>>) -> Ledger {
        Ledger { members, ..Ledger::new(false) }
    }

    /// The ledger of each device.
    pub fn devices(self: &Arc<Ledger>) -> Vec<Arc<Ledger>> {
        if self.members.is_empty() { vec![Arc::clone(self)] } else { self.members.clone() }
    }

    /// Pinned host memory held now.
    pub fn pinned(&self) -> u64 {
        self.pinned.load(Relaxed)
    }

    /// Counts bytes of the device, and of pinned host memory.
    pub fn hold(self: &Arc<Ledger>, device: u64, host: u64) -> Held {
        let (device, host) = if self.is_host { (device + host, 0) } else { (device, host) };
        let now = self.now.fetch_add(device, Relaxed) + device;
        self.peak.fetch_max(now, Relaxed);
        self.pinned.fetch_add(host, Relaxed);
        Held { ledger: Arc::clone(self), device, host }
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
        let host = if self.is_host { now } else { self.pinned() };
        let own = MemoryUse { now, peak, reserved: self.idle(), host };
        self.members.iter().map(|member| member.figures()).fold(own, |sum, member| MemoryUse {
            now: sum.now + member.now,
            peak: sum.peak + member.peak,
            reserved: sum.reserved + member.reserved,
            host: sum.host + member.host,
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.now.fetch_sub(self.device, Relaxed);
        self.ledger.pinned.fetch_sub(self.host, Relaxed);
    }
}

/// The ledgers that a session shares memory with.
#[derive(Debug)]
pub struct Sharing {
    /// Of every session on the same device, this one included.
    pub device: Vec<Arc<Ledger>>,
    /// The sum of the handle's sessions.
    pub handle: Arc<Ledger>,
}

impl Sharing {
    /// Of a session that is alone.
    pub fn with_nobody(own: &Arc<Ledger>) -> Sharing {
        Sharing { device: vec![Arc::clone(own)], handle: Arc::new(Ledger::sum(vec![Arc::clone(own)])) }
    }

    /// Bytes of the device that a session may use: an equal share of what is free or held by those it shares with,
    /// less what it uses now.
    pub fn device_bytes(&self, free: u64, own: &Ledger) -> u64 {
        let used = own.figures().now.saturating_sub(own.idle());
        let held: u64 = self.device.iter().map(|ledger| ledger.figures().now).sum();
        (free.saturating_add(held) / self.device.len() as u64).saturating_sub(used)
    }

    /// The same for host memory, of which the session keeps `idle` bytes for its next call.
    pub fn host_bytes(&self, limit: Limit, free: u64, own: &Ledger, idle: u64) -> u64 {
        let members = self.handle.devices();
        let count = members.len() as u64;
        if let Limit::Bytes(bytes) = limit {
            return bytes.saturating_sub(self.handle.pinned()) / count;
        }
        let pinned: u64 = members.iter().map(|member| member.pinned()).sum();
        let share = free.saturating_add(pinned) / count;
        limit.bytes(share.saturating_sub(own.pinned().saturating_sub(idle)), HOST_MARGIN / count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_outlives_what_was_held() {
        let ledger = Arc::new(Ledger::default());
        let a = ledger.hold(100, 0);
        drop(ledger.hold(50, 0));
        drop(a);
        assert_eq!((ledger.figures().now, ledger.figures().peak), (0, 150));
    }

    #[test]
    fn a_sum_counts_every_device_and_its_own() {
        let members = [Arc::new(Ledger::new(false)), Arc::new(Ledger::new(true))];
        let sum = Arc::new(Ledger::sum(members.to_vec()));
        let _held = (members[0].hold(100, 7), members[1].hold(50, 0), sum.hold(0, 3));
        members[1].set_idle(20);
        assert_eq!(sum.figures(), MemoryUse { now: 150, peak: 150, reserved: 20, host: 60 });
        assert_eq!(sum.devices().len(), 2);
    }
}
