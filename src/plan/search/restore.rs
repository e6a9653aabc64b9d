//! Plans a stream from a saved plan. It is untrusted input, so it is checked like a host's request.

use std::cmp::Ordering;
use std::sync::Arc;

use super::candidates::{can_rematerialise, hidden_stage};
use crate::ir::CacheFormat;
use crate::plan::cost::{Target, fetchable_weights};
use crate::plan::plan::Plan;
use crate::plan::policy::{CachePolicy, MIN_MATERIALISED_HIDDEN, SchedulePolicy, recomputable_layer};
use crate::plan::request::{MAX_WORK_ITEMS, Request};
use crate::plan::spec::{ItemOrder, ScheduleSpec};
use crate::plan::tiles::{Grid, TileSize};

/// More latent frames per slice than any host can ask for.
const MAX_SAVED_SLICE: u64 = 1 << 12;
/// More latent frames than the chunks of any policy of a search take to begin together again.
const MAX_PERIOD: u64 = 64;
/// Weights of the fades of all tiles of an axis.
const MAX_FADES: u64 = 1 << 24;

/// Everything about a plan that a search decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedPlan {
    pub policy: SchedulePolicy,
    pub tiles: Option<TileSize>,
}

impl ScheduleSpec {
    pub fn saved_plan(&self) -> SavedPlan {
        SavedPlan { policy: (*self.policy).clone(), tiles: self.grid.as_ref().map(|grid| grid.size) }
    }
}

/// A stream that follows a saved plan, whatever the limits; `None` if the saved plan is not valid for it.
pub fn restore(request: &Request, saved: &SavedPlan, target: &Target) -> Option<Plan> {
    if request.input.frames != 0 || !is_valid(request, &saved.policy, target) {
        return None;
    }
    let grid = match saved.tiles {
        None => None,
        Some(size) => Some(checked_grid(request, size)?),
    };
    let spec = request.spec(Arc::new(saved.policy.clone()), grid, ItemOrder::SliceBySlice);
    Some(Plan::rehearse(request, spec, target).packed(target))
}

fn is_valid(request: &Request, policy: &SchedulePolicy, target: &Target) -> bool {
    let network = &*request.network;
    let (stages, layers, rate) = (network.stages.len(), network.layers.len(), network.latent_rate());
    let slice = policy.slice > 0 && policy.slice.is_multiple_of(rate) && policy.slice / rate <= MAX_SAVED_SLICE;
    let lengths = policy.chunks.len() == stages
        && policy.materialised.len() == stages
        && policy.materialised_hidden.len() == stages
        && policy.caches.len() == layers
        && policy.offloaded_weights.len() == layers
        && policy.offloaded_outputs == vec![false; layers];
    let whole_pairs = |stage: usize, chunk: u64| chunk.is_multiple_of(2) || !network.needs_pairs(stage);
    let chunks = || {
        policy
            .chunks
            .iter()
            .enumerate()
            .all(|(stage, chunk)| (1..=target.profile.chunk_frames).contains(chunk) && whole_pairs(stage, *chunk))
    };
    // Longer slices are rehearsed one period at a time.
    let period = || policy.slice / rate <= MAX_PERIOD || policy.period(network) <= MAX_PERIOD;
    let fetchable = fetchable_weights(network, request.input_frame(), target);
    let weights = || policy.offloaded_weights.iter().zip(&fetchable).all(|(offloaded, can)| *can || !offloaded);
    slice
        && lengths
        && chunks()
        && period()
        && weights()
        && caches_are_valid(request, &policy.caches, target)
        && (0..stages).all(|stage| materialised_is_valid(request, policy, stage, target))
        && (0..stages).all(|stage| hidden_is_valid(request, policy, stage, target))
}

/// Only at full resolution, where weights are always resident: a layer that rematerialises cannot fetch its own.
fn hidden_is_valid(request: &Request, policy: &SchedulePolicy, stage: usize, target: &Target) -> bool {
    let (hidden, chunk) = (policy.materialised_hidden[stage], policy.chunks[stage]);
    hidden == chunk
        || (MIN_MATERIALISED_HIDDEN..chunk).contains(&hidden) && hidden_stage(request, target) == Some(stage)
}

/// Readers of rematerialised frames run in bands, and their own cache is not recomputed.
fn materialised_is_valid(request: &Request, policy: &SchedulePolicy, stage: usize, target: &Target) -> bool {
    let [first, second] = request.network.stages[stage].blocks[0].layers().map(|layer| policy.caches[layer]);
    match policy.materialised[stage].cmp(&policy.chunks[stage]) {
        Ordering::Equal => true,
        Ordering::Greater => false,
        Ordering::Less => {
            let banded = matches!(first, CachePolicy::Offloaded { .. }) && second != CachePolicy::Resident;
            can_rematerialise(request, stage, target) && banded
        }
    }
}

fn caches_are_valid(request: &Request, caches: &[CachePolicy], target: &Target) -> bool {
    let offloadable = target.offloadable_caches(&request.network);
    let offloads = target.profile.offloads;
    caches.iter().enumerate().all(|(layer, policy)| {
        let stage = offloadable.iter().find(|(_, offloadable)| *offloadable == layer).map(|(stage, _)| *stage);
        match (policy, stage) {
            (CachePolicy::Resident, _) => request.network.layers[layer].cache == CacheFormat::Exact,
            (CachePolicy::Offloaded { resident_shares }, Some(_)) => {
                offloads && *resident_shares <= CachePolicy::SHARES
            }
            (CachePolicy::Recomputed, Some(stage)) => {
                offloads && recomputable_layer(&request.network, stage) == Some(layer)
            }
            (CachePolicy::Offloaded { .. } | CachePolicy::Recomputed, None) => false,
        }
    })
}

/// The tiles of this size, if there are any and not too many.
fn checked_grid(request: &Request, size: TileSize) -> Option<Arc<Grid>> {
    let scale = request.network.config.spatial_scale();
    let (rows, columns) = request.latent();
    let (down, across) = size.count(rows, columns, scale);
    let fades = |spans: u64, pixels: u64, length: u64| spans.saturating_mul(pixels.min(length * scale));
    let too_long = fades(down, size.height, rows).max(fades(across, size.width, columns)) > MAX_FADES;
    if too_long || request.work_items(size) > MAX_WORK_ITEMS { None } else { request.grid(size) }
}
