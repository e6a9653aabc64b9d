//! Weights on a device: brought there once, shared by every session that uses the same file the same way.

use std::any::Any;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::Allocators;
use super::ledger::{Held, Ledger};
use crate::backend::{Backend, Precision};
use crate::error::{Error, Result};
use crate::model::checkpoint::FileIdentity;
use crate::model::fold::{self, LayerWeights};
use crate::model::{Checkpoint, Direction, Layer, Network};
use crate::plan::WeightBytes;

/// The prepared convolutions of one network, in the order of its layers.
pub struct Weights<B: Backend> {
    pub convs: Vec<B::Conv>,
    /// Whether some wait in host memory that could not be pinned.
    pub pageable: bool,
}

/// Two sessions with equal keys can share.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightsKey {
    pub file: FileIdentity,
    pub device: String,
    pub precision: Precision,
    pub direction: Direction,
    /// Of each layer, whether its weights wait in host memory.
    pub away: Vec<bool>,
    pub allocators: Allocators,
}

type WeakWeights = Weak<dyn Any + Send + Sync>;

/// What one key stands for: locked while it is being loaded, so that a second session waits instead of loading again.
type RegistryEntry = Mutex<WeakWeights>;

/// How often a session that waits for another one's load looks whether its own call was cancelled.
const PATIENCE: Duration = Duration::from_millis(20);

static REGISTRY: Mutex<Vec<(WeightsKey, Weak<RegistryEntry>)>> = Mutex::new(Vec::new());

fn entry(key: &WeightsKey) -> Arc<RegistryEntry> {
    let mut registry = REGISTRY.lock();
    registry.retain(|(_, entry)| entry.strong_count() > 0);
    if let Some(found) = registry.iter().find(|(k, _)| k == key).and_then(|(_, entry)| entry.upgrade()) {
        return found;
    }
    let nothing: WeakWeights = Weak::<()>::new();
    let made = Arc::new(Mutex::new(nothing));
    registry.push((key.clone(), Arc::downgrade(&made)));
    made
}

/// The entry to oneself, when nobody loads it any more. Whoever loads goes on, whatever becomes of those who wait.
fn wait<'a>(entry: &'a RegistryEntry, cancel: &AtomicBool) -> Result<MutexGuard<'a, WeakWeights>> {
    loop {
        if let Some(free) = entry.try_lock_for(PATIENCE) {
            return Ok(free);
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
    }
}

/// A session's share of some weights.
pub struct Share<B: Backend> {
    away: Vec<bool>,
    weights: Arc<Weights<B>>,
    /// Keeps the registry's entry alive as long as the weights.
    _entry: Arc<RegistryEntry>,
    /// Shared with the streams of the session, so that weights count as long as any of them needs them, and once.
    held: Arc<Held>,
    /// What waits in host memory.
    pinned: Arc<Held>,
}

impl<B: Backend> Clone for Share<B> {
    fn clone(&self) -> Share<B> {
        let Share { away, weights, _entry, held, pinned } = self;
        Share {
            away: away.clone(),
            weights: Arc::clone(weights),
            _entry: Arc::clone(_entry),
            held: Arc::clone(held),
            pinned: Arc::clone(pinned),
        }
    }
}

impl<B: Backend> Share<B> {
    /// Whether no stream needs them.
    pub fn is_idle(&self) -> bool {
        Arc::strong_count(&self.held) == 1
    }

    /// Of each layer, whether its weights wait in host memory.
    pub fn away(&self) -> &[bool] {
        &self.away
    }

    /// Bytes on the device, and of host memory beside it.
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    pub fn host_bytes(&self) -> u64 {
        self.pinned.bytes()
    }
}

impl<B: Backend> std::ops::Deref for Share<B> {
    type Target = Weights<B>;
    fn deref(&self) -> &Weights<B> {
        &self.weights
    }
}

/// The most memory that loading takes at any moment, the weights loaded so far included; 0 where that is no more than these.
pub fn load_bytes<B: Backend>(backend: &B, network: &Network) -> u64 {
    if !B::HOST_MEMORY {
        return 0;
    }
    let mut loaded = 0;
    let moments = network.layers.iter().map(|layer| {
        loaded += backend.weight_bytes(&layer.layout);
        loaded + transient_bytes(layer)
    });
    moments.max().unwrap_or(0)
}

/// One slab in plain form, and what folding it takes. Host memory, so nothing to a device that has its own.
fn transient_bytes(layer: &Layer) -> u64 {
    let slab = (0..layer.layout.slab_count()).map(|slab| layer.layout.slab_elements(slab)).max().unwrap_or(0);
    slab * size_of::<f32>() as u64 + fold::transient_bytes(layer)
}

/// The weights for `key`: somebody else's if there are any or will be soon, else loaded now.
pub fn share<B: Backend>(
    backend: &B,
    key: &WeightsKey,
    path: &Path,
    (network, bytes): (&Network, WeightBytes),
    ledger: &Arc<Ledger>,
    cancel: &AtomicBool,
) -> Result<Share<B>> {
    let entry = entry(key);
    let mut weights = wait(&entry, cancel)?;
    let pinned = Arc::new(ledger.hold_pinned(bytes.host));
    let known = weights.upgrade().and_then(|any| any.downcast::<Weights<B>>().ok());
    let (shared, held) = match known {
        Some(shared) => (shared, ledger.hold(bytes.device())),
        None => {
            let (loaded, held) = load(backend, key, path, (network, bytes), ledger, cancel)?;
            let loaded = Arc::new(loaded);
            let any: Arc<dyn Any + Send + Sync> = Arc::clone(&loaded) as _;
            *weights = Arc::downgrade(&any);
            (loaded, held)
        }
    };
    drop(weights);
    Ok(Share { away: key.away.clone(), weights: shared, _entry: entry, held: Arc::new(held), pinned })
}

/// A store, and how much of it has been given out.
struct Room<S> {
    store: S,
    taken: u64,
}

fn load<B: Backend>(
    backend: &B,
    key: &WeightsKey,
    path: &Path,
    (network, bytes): (&Network, WeightBytes),
    ledger: &Arc<Ledger>,
    cancel: &AtomicBool,
) -> Result<(Weights<B>, Held)> {
    let checkpoint = Checkpoint::open(path)?;
    if *checkpoint.identity() != key.file {
        let why = "the file has changed since the handle was created; create a new handle";
        return Err(Error::Checkpoint(format!("{}: {why}", path.display())));
    }
    let mut convs = Vec::with_capacity(network.layers.len());
    // A device has all of its weights in one block; the host takes memory as it goes.
    let mut held = ledger.hold(if B::HOST_MEMORY { 0 } else { bytes.device() });
    let mut near = Room { store: backend.allocate_weights(bytes.block)?, taken: 0 };
    let mut far = match bytes.host {
        0 => None,
        bytes => Some(Room { store: backend.allocate_host_weights(bytes)?, taken: 0 }),
    };
    for (layer, away) in network.layers.iter().zip(&key.away) {
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        let layout = &layer.layout;
        let _transient = B::HOST_MEMORY.then(|| {
            held.grow(backend.weight_bytes(layout));
            ledger.hold(transient_bytes(layer))
        });
        let room = far.as_mut().filter(|_| *away).unwrap_or(&mut near);
        convs.push(backend.prepare(&room.store, room.taken, layout, &mut LayerWeights::new(&checkpoint, layer)?)?);
        room.taken += backend.weight_bytes(layout);
    }
    // A file that was written to meanwhile may have given us half of each.
    checkpoint.verify_unchanged()?;
    let pageable = far.is_some_and(|room| backend.is_pageable_store(&room.store));
    Ok((Weights { convs, pageable }, held))
}
