//! Weights on a device: loaded once, shared by all sessions with an equal key.

use std::any::Any;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::Allocators;
use super::ledger::{Held, Ledger};
use crate::backend::{Backend, Precision, Residency};
use crate::error::{Result, check_cancel};
use crate::ir::TensorDevice;
use crate::model::checkpoint::FileIdentity;
use crate::model::fold::{self, LayerWeights};
use crate::model::{Checkpoint, Direction, Layer, Network};
use crate::plan::WeightBytes;
use crate::reserve;

/// The prepared convolutions of one network, in the order of its layers.
pub struct Weights<B: Backend> {
    pub convs: Vec<B::Conv>,
    /// Whether offloaded weights could not be pinned.
    pub pageable: bool,
}

/// Two sessions with equal keys can share.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightsKey {
    pub file: FileIdentity,
    pub place: TensorDevice,
    pub precision: Precision,
    /// Whether slabs are those of pairs of frames. `VVAE_ARCH` may change that between two handles.
    pub pairs: bool,
    pub direction: Direction,
    /// Per layer, whether its weights are offloaded.
    pub offloaded: Vec<bool>,
    pub allocators: Allocators,
}

type WeakWeights = Weak<dyn Any + Send + Sync>;

/// The weights of one key. Locked during the load, so that a second session waits instead of loading again.
type RegistryEntry = Mutex<WeakWeights>;

/// How often a session that waits for another one's load checks for a cancel.
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

/// Locks the entry once no other session loads it. A cancel ends the waiting, not the load.
fn wait<'a>(entry: &'a RegistryEntry, cancel: &AtomicBool) -> Result<MutexGuard<'a, WeakWeights>> {
    loop {
        if let Some(free) = entry.try_lock_for(PATIENCE) {
            return Ok(free);
        }
        check_cancel(cancel)?;
    }
}

/// A session's share of some weights.
pub struct SharedWeights<B: Backend> {
    offloaded: Vec<bool>,
    weights: Arc<Weights<B>>,
    /// Keeps the registry's entry alive as long as the weights.
    _entry: Arc<RegistryEntry>,
    /// Shared with the streams of the session, so that weights count once, as long as any of them uses them.
    held: Arc<Held>,
    /// Offloaded weights.
    pinned: Arc<Held>,
}

impl<B: Backend> Clone for SharedWeights<B> {
    fn clone(&self) -> SharedWeights<B> {
        let SharedWeights { offloaded, weights, _entry, held, pinned } = self;
        SharedWeights {
            offloaded: offloaded.clone(),
            weights: Arc::clone(weights),
            _entry: Arc::clone(_entry),
            held: Arc::clone(held),
            pinned: Arc::clone(pinned),
        }
    }
}

impl<B: Backend> SharedWeights<B> {
    /// Whether no stream needs them.
    pub fn is_idle(&self) -> bool {
        Arc::strong_count(&self.held) == 1
    }

    /// Per layer, whether its weights are offloaded.
    pub fn offloaded(&self) -> &[bool] {
        &self.offloaded
    }

    /// Bytes on the device, and of host memory beside it.
    pub fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    pub fn host_bytes(&self) -> u64 {
        self.pinned.bytes()
    }
}

impl<B: Backend> std::ops::Deref for SharedWeights<B> {
    type Target = Weights<B>;
    fn deref(&self) -> &Weights<B> {
        &self.weights
    }
}

/// Peak host memory of loading, weights included. 0 where a device holds them: loading then takes no more.
pub fn load_bytes<B: Backend>(backend: &B, network: &Network) -> u64 {
    if !B::HOST_MEMORY {
        return 0;
    }
    let mut loaded = 0;
    let moments = network.layers.iter().map(|layer| {
        loaded += backend.sizes().weight_bytes(&layer.layout);
        loaded + transient_bytes(layer)
    });
    moments.max().unwrap_or(0)
}

/// Host bytes to load a layer: one slab in plain form, the layer's tensors as read, and what folding takes.
fn transient_bytes(layer: &Layer) -> u64 {
    let slab = (0..layer.layout.slab_count()).map(|slab| layer.layout.slab_elements(slab)).max().unwrap_or(0);
    slab * size_of::<f32>() as u64 + fold::transient_bytes(layer)
}

/// What it takes to load the weights of `key`.
pub struct Loading<'a, B: Backend> {
    pub backend: &'a B,
    pub key: WeightsKey,
    pub path: &'a Path,
    pub network: &'a Network,
    pub bytes: WeightBytes,
    pub ledger: &'a Arc<Ledger>,
    pub cancel: &'a AtomicBool,
}

/// A store, and the bytes that are taken.
struct WeightStore<S> {
    store: S,
    taken: u64,
}

impl<B: Backend> Loading<'_, B> {
    /// The weights of another session if it has or loads them, else loaded now.
    pub fn share(self) -> Result<SharedWeights<B>> {
        let entry = entry(&self.key);
        let mut weights = wait(&entry, self.cancel)?;
        let pinned = Arc::new(self.ledger.hold_pinned(self.bytes.host));
        let known = weights.upgrade().and_then(|any| any.downcast::<Weights<B>>().ok());
        let (shared, held) = match known {
            Some(shared) => (shared, self.ledger.hold(self.bytes.device())),
            None => {
                let (loaded, held) = self.load()?;
                let loaded = Arc::new(loaded);
                let any: Arc<dyn Any + Send + Sync> = Arc::clone(&loaded) as _;
                *weights = Arc::downgrade(&any);
                (loaded, held)
            }
        };
        drop(weights);
        let held = Arc::new(held);
        Ok(SharedWeights { offloaded: self.key.offloaded, weights: shared, _entry: entry, held, pinned })
    }

    fn load(&self) -> Result<(Weights<B>, Held)> {
        let Loading { backend, key, network, bytes, ledger, .. } = self;
        let checkpoint = Checkpoint::reopen(self.path, &key.file)?;
        let mut convs = Vec::with_capacity(network.layers.len());
        // A device has all of its weights in one block; the host takes memory as it goes.
        let mut held = ledger.hold(if B::HOST_MEMORY { 0 } else { bytes.device() });
        let mut resident = WeightStore { store: backend.allocate_weights(bytes.block, Residency::Device)?, taken: 0 };
        let mut host = match bytes.host {
            0 => None,
            bytes => Some(WeightStore { store: backend.allocate_weights(bytes, Residency::Host)?, taken: 0 }),
        };
        for (layer, offloaded) in network.layers.iter().zip(&key.offloaded) {
            check_cancel(self.cancel)?;
            reserve::check()?;
            let layout = &layer.layout;
            let _transient = B::HOST_MEMORY.then(|| {
                held.grow(backend.sizes().weight_bytes(layout));
                ledger.hold(transient_bytes(layer))
            });
            let into = host.as_mut().filter(|_| *offloaded).unwrap_or(&mut resident);
            convs.push(backend.prepare(
                &into.store,
                into.taken,
                layout,
                &mut LayerWeights::new(&checkpoint, layer)?,
            )?);
            into.taken += backend.sizes().weight_bytes(layout);
        }
        // A file that changed during the load may have given a mix.
        checkpoint.verify_unchanged()?;
        let pageable = host.is_some_and(|host| backend.is_pageable_store(&host.store));
        Ok((Weights { convs, pageable }, held))
    }
}
