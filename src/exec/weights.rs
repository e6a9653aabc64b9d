//! Weights on a device: loaded once, shared by all sessions with an equal key.

use std::any::Any;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::Allocators;
use super::device_model::DeviceModel;
use super::ledger::{Held, Ledger};
use crate::backend::{Backend, Precision, Residency};
use crate::error::{Result, check_cancel};
use crate::ir::{LayerId, TensorDevice, WeightPart, Window};
use crate::model::checkpoint::{CheckpointFile, FileIdentity};
use crate::model::fold::{self, BufferedWeights, FoldBuffers, FoldBytes, LayerWeights, ProductType};
use crate::model::{Checkpoint, Direction, Network};
use crate::plan::WeightBytes;
use crate::{reserve, thread_pool};

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
    /// Kernels may read weights in an order of their own. `VVAE_ARCH` may change kernels between two handles.
    pub arithmetic: String,
    pub direction: Direction,
    /// Per layer, whether its weights are offloaded.
    pub offloaded: Vec<bool>,
    pub allocators: Allocators,
}

/// Some [`Weights`], once they are loaded.
type AnyWeights = Option<Arc<dyn Any + Send + Sync>>;

/// The weights of one key. Locked during the load, so that a second session waits instead of loading again.
type RegistryEntry = Mutex<AnyWeights>;

/// How often a session that waits for another one's load checks for a cancel.
const PATIENCE: Duration = Duration::from_millis(20);

static REGISTRY: Mutex<Vec<(WeightsKey, Weak<RegistryEntry>)>> = Mutex::new(Vec::new());

fn entry(key: &WeightsKey) -> Arc<RegistryEntry> {
    let mut registry = REGISTRY.lock();
    registry.retain(|(_, entry)| entry.strong_count() > 0);
    if let Some(found) = registry.iter().find(|(k, _)| k == key).and_then(|(_, entry)| entry.upgrade()) {
        return found;
    }
    let made = Arc::default();
    registry.push((key.clone(), Arc::downgrade(&made)));
    made
}

/// Locks the entry once no other session loads it. A cancel ends the waiting, not the load.
fn wait<'a>(entry: &'a RegistryEntry, cancel: &AtomicBool) -> Result<MutexGuard<'a, AnyWeights>> {
    loop {
        if let Some(free) = entry.try_lock_for(PATIENCE) {
            return Ok(free);
        }
        check_cancel(cancel)?;
    }
}

/// A session's share of some weights. Its streams have the same one, so weights count once, as long as any of them
/// uses them.
pub struct SharedWeights<B: Backend> {
    pub loaded: Arc<Weights<B>>,
    pub key: WeightsKey,
    /// The registry's entry, which keeps the weights as long as any session shares them.
    _entry: Arc<RegistryEntry>,
    /// On the device, and offloaded.
    pub held: Held,
}

/// Peak host memory of loading, weights included. 0 where a device holds them: loading then takes no more.
pub fn load_bytes<B: Backend>(backend: &B, network: &Network) -> u64 {
    if B::HOST_MEMORY { weight_bytes(backend, network) + PartsInFlight::of(backend, network).bytes } else { 0 }
}

fn weight_bytes<B: Backend>(backend: &B, network: &Network) -> u64 {
    network.layers.iter().map(|layer| backend.sizes().weight_bytes(&layer.layout)).sum()
}

/// The parts of weights that are folded and packed at a time. Depends on the network only, so that plans are the same
/// on every machine.
struct PartsInFlight {
    /// At most so many.
    count: usize,
    /// Host bytes beside the weights: the list of parts, and buffers for those in flight.
    bytes: u64,
}

impl PartsInFlight {
    fn of<B: Backend>(backend: &B, network: &Network) -> PartsInFlight {
        let (mut largest, mut parts) = (FoldBytes::default(), 0);
        for layer in &network.layers {
            for part in backend.weight_parts(&layer.layout) {
                largest = largest.max(fold::bytes(layer, &part));
                parts += 1;
            }
        }
        // Buffers that count take a quarter of what the weights take, or those of one part.
        let room = if B::HOST_MEMORY { weight_bytes(backend, network) / 4 } else { u64::MAX };
        let count = (room / largest.total().max(1)).min(parts).clamp(1, thread_pool::MOST_THREADS as u64);
        let list = parts * size_of::<(LayerId, WeightPart)>() as u64;
        PartsInFlight { count: count as usize, bytes: list + count * largest.total() }
    }
}

/// What it takes to load the weights of `key`.
pub struct Loading<'a, B: Backend> {
    pub on: &'a DeviceModel<B>,
    pub key: WeightsKey,
    pub file: &'a CheckpointFile,
    pub bytes: WeightBytes,
    pub ledger: &'a Arc<Ledger>,
    pub cancel: &'a AtomicBool,
}

impl<B: Backend> Loading<'_, B> {
    /// The weights of another session if it has or loads them, else loaded now.
    pub fn share(self) -> Result<Arc<SharedWeights<B>>> {
        let entry = entry(&self.key);
        let mut weights = wait(&entry, self.cancel)?;
        let held = self.ledger.hold(self.bytes.device(), self.bytes.host);
        let known = weights.clone().and_then(|any| any.downcast::<Weights<B>>().ok());
        let loaded = match known {
            Some(known) => known,
            None => {
                let loaded = Arc::new(self.on.with_threads(|| self.load())?);
                *weights = Some(Arc::clone(&loaded) as _);
                loaded
            }
        };
        drop(weights);
        Ok(Arc::new(SharedWeights { loaded, key: self.key, _entry: entry, held }))
    }

    fn load(&self) -> Result<Weights<B>> {
        let Loading { on, key, bytes, ledger, .. } = self;
        let (backend, network) = (&*on.device, on.network(key.direction));
        let checkpoint = self.file.open()?;
        let resident = backend.allocate_weights(bytes.block, Residency::Device)?;
        let offloaded = || backend.allocate_weights(bytes.host, Residency::Host);
        let host = (bytes.host > 0).then(offloaded).transpose()?;
        // Bytes taken of the device's store, and of the host's.
        let mut taken = [0; 2];
        let mut convs = Vec::with_capacity(network.layers.len());
        for (layer, offloaded) in network.layers.iter().zip(&key.offloaded) {
            check_cancel(self.cancel)?;
            let host = host.as_ref().filter(|_| *offloaded);
            let taken = &mut taken[usize::from(host.is_some())];
            convs.push(backend.allocate_conv(host.unwrap_or(&resident), *taken, &layer.layout)?);
            *taken += backend.sizes().weight_bytes(&layer.layout);
        }
        let in_flight = PartsInFlight::of(backend, network);
        let transient = B::HOST_MEMORY.then(|| ledger.hold(in_flight.bytes, 0));
        self.write(&checkpoint, &convs, in_flight.count)?;
        drop(transient);
        // A file that changed during the load may have given a mix.
        checkpoint.verify_unchanged()?;
        let pageable = host.is_some_and(|host| backend.is_pageable_store(&host));
        Ok(Weights { convs, pageable })
    }

    /// Folds and packs the parts of all layers on all cores, at most `in_flight` at a time.
    fn write(&self, checkpoint: &Checkpoint, convs: &[B::Conv], in_flight: usize) -> Result<()> {
        let (backend, network) = (&*self.on.device, self.on.network(self.key.direction));
        // The error of f32 products is far below that of rounding to 16 bits.
        let product_type = match backend.precision() {
            Precision::Fp16 | Precision::Bf16 => ProductType::F32,
            Precision::Fp32 => ProductType::F64,
        };
        let sources = network.layers.iter().map(|layer| LayerWeights::new(checkpoint, layer, product_type));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let mut parts: Vec<(LayerId, WeightPart)> = Vec::new();
        for (id, layer) in network.layers.iter().enumerate() {
            parts.extend(backend.weight_parts(&layer.layout).into_iter().map(|part| (id, part)));
        }
        // Those of upsamplers take longest. If they came last, most cores would wait for a few.
        parts.sort_by_key(|(id, _)| network.layers[*id].layout.window != Window::Up);
        let write = |(fold_buffers, pack_buffers): &mut (FoldBuffers, B::PackBuffers),
                     (id, part): (LayerId, WeightPart)| {
            let mut source = BufferedWeights { weights: &sources[id], buffers: fold_buffers };
            check_cancel(self.cancel)?;
            reserve::check()?;
            backend.write_part(&convs[id], &part, &mut source, pack_buffers)
        };
        let threads = in_flight.min(thread_pool::threads_for(usize::MAX));
        thread_pool::try_for_each(threads, parts, Default::default, write)
    }
}
